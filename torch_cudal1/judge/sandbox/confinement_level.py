"""Confinement levels as values: the result of a probe, the level that it reached, and the choice of
a level for a trust. Pure functions; `probe` does the probing.

A level is reached when every forbidden act of this level and of the lower ones failed, and every
needed act worked.

- 1: a disposable process with its own session, limits and a clean environment; it is killed with
  all that it started.
- 2: also no_new_privs, Landlock, a system-call filter, no capabilities, and a user of its own where
  root starts it.
- 3: also mount, pid, network and IPC namespaces, with a root that holds only what it may use.

`WHAT_IS_NOT_STOPPED` says what each level does not stop. No level limits GPU time, what device code
does in its own context, or what Python code does inside its own process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch_cudal1.judge.sandbox.confine.seccomp import Phase
from torch_cudal1.judge.sandbox.limits import Trust

__all__ = [
    "MIN_LEVEL",
    "REMEDIES",
    "WHAT_IS_NOT_STOPPED",
    "WHAT_IS_STOPPED",
    "Confinement",
    "Control",
    "LevelChoice",
    "ProbeResult",
    "choose_level",
]

WHAT_IS_STOPPED: Mapping[int, str] = {
    1: "crashes, hangs, sticky CUDA errors, what it leaves running, patching of your process",
    2: "reading and writing files elsewhere, the network, signals, ptrace, gaining privileges",
    3: "seeing other processes, files and network interfaces at all",
}
WHAT_IS_NOT_STOPPED: Mapping[int, str] = {
    0: "anything: judging needs at least level 1",
    1: "reading and writing your files, the network, signals and ptrace between processes of one user",
    2: "holes in the kernel and the GPU driver, a GPU kept busy, side channels, reading names and command lines of other processes",
    3: "holes in the kernel and the GPU driver, which all processes share, a GPU kept busy, side channels",
}
REMEDIES: Mapping[int, str] = {
    1: "free a folder for scratch files and let this user start processes",
    2: "it needs x86-64 Linux 5.13 or newer (6.12 for signals in the build phase) with Landlock switched on (boot option "
    "lsm=landlock,...) and a container that permits seccomp",
    3: "it needs user namespaces for users (sysctl user.max_user_namespaces above 0, on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0), or root with CAP_SYS_ADMIN, and a /proc that no container masks",
}
# Own code writes the user's compiler caches, so it gets no root of its own.
_HIGHEST: Mapping[Trust, int] = {"own": 2, "foreign": 3}
# Level 1 does not stop reading, writing and sending the user's files, which foreign code may try.
MIN_LEVEL: Mapping[Trust, int] = {"own": 1, "foreign": 2}


@dataclass(frozen=True)
class Control:
    """One act in the child, and whether it came out right.

    `level` 0: a needed act, `ok` if it worked. Otherwise a forbidden act, `ok` if it failed.
    """

    name: str
    level: int
    ok: bool
    detail: str


@dataclass(frozen=True)
class ProbeResult:
    """The acts of a child that was confined to level `asked`. `error`: why no such child started."""

    asked: int
    controls: tuple[Control, ...] = ()
    error: str = ""
    uid: int = -1
    kernel: str = ""
    landlock: int = 0
    filter_digest: str = ""

    @property
    def wrong(self) -> tuple[Control, ...]:
        """Controls that did not hold and needs that were not met."""
        return tuple(control for control in self.controls if not control.ok)

    @property
    def level(self) -> int:
        """The highest level, up to the one asked for, whose acts all came out right; 0: none."""
        # Without a needed act the child cannot serve, so no level counts. No controls: nothing was
        # shown.
        if self.error or not self.controls or any(control.level == 0 for control in self.wrong):
            return 0
        return min([self.asked, *(control.level - 1 for control in self.wrong)])

    @property
    def why(self) -> str:
        """Why level `asked` was not reached; "" if it was."""
        return self.error or "; ".join(
            f"{control.name}: {control.detail}" for control in self.wrong
        )


@dataclass(frozen=True)
class LevelChoice:
    """The level to use; 0: no level suffices. `missing`: why it is not a higher one, "" for the
    highest that this trust gets.
    """

    level: int
    missing: str


@dataclass(frozen=True)
class Confinement:
    """The facts of one child's confinement, as they go into an entry's evidence."""

    level: int
    trust: Trust
    phase: Phase
    uid: int
    kernel: str
    landlock: int
    filter_digest: str
    missing: str = ""
    unsafe: bool = False

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        return asdict(self)


def choose_level(
    trust: Trust, probes: Iterable[ProbeResult], *, unsafe: bool = False
) -> LevelChoice:
    """The highest level that a probe reached and that `trust` gets; level 0 when that is too low.

    `unsafe`: foreign code may run at a level below the one that it needs, but not at 0.
    """
    allowed = [probed for probed in probes if probed.asked <= _HIGHEST[trust]]
    level = max((probed.level for probed in allowed), default=0)
    missing = "; ".join(f"level {p.asked}: {p.why}" for p in allowed if p.asked > level and p.why)
    if level < MIN_LEVEL[trust] and not (unsafe and level):
        return LevelChoice(0, missing or "nothing was tried")
    return LevelChoice(level, missing)
