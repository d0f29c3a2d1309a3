"""How well a child is confined, as values: what was seen, which level that is, what trust demands.
Pure: nothing is tried here.

A level is reached when every forbidden act of it, and of those below, failed and every needed act
worked.

- 1, a process that is thrown away: its own session, limits, a clean environment; it is killed with
  all that it started.
- 2, plus no_new_privs, Landlock, a system-call filter, no capabilities, and a user of its own where
  root starts it.
- 3, plus mount, pid, network and IPC namespaces, with a root that holds nothing but what it may
  use.

`WHAT_IS_NOT_STOPPED` says for each what it does not stop. No level limits GPU time, what device code does
in its own context, or what Python code does inside its own process.
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
_HIGHEST: Mapping[Trust, int] = {
    "own": 2,
    "foreign": 3,
}  # code of ours needs the user's caches, so no root of its own
MIN_LEVEL: Mapping[Trust, int] = {"own": 1, "foreign": 2}


@dataclass(frozen=True)
class Control:
    """One act in the child. `level` 0: a needed act, `ok` if it worked; else a forbidden act, `ok`
    if it failed.
    """

    name: str
    level: int
    ok: bool
    detail: str


@dataclass(frozen=True)
class ProbeResult:
    """What a child that was to be confined to level `asked` could and could not do. `error`: why
    there was no such child.
    """

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
        if self.error or not self.controls or any(control.level == 0 for control in self.wrong):
            return 0
        return min([self.asked, *(control.level - 1 for control in self.wrong)])

    @property
    def why(self) -> str:
        """Why the level asked for was not reached; "" if it was."""
        return self.error or "; ".join(
            f"{control.name}: {control.detail}" for control in self.wrong
        )


@dataclass(frozen=True)
class LevelChoice:
    """The level to use, and why it is not a higher one ("": it is the highest that this trust is
    given). 0: none will do.
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
    """The best level that was seen to work and that this trust is given; level 0, with what is
    missing, when it is too low.

    `unsafe` lets foreign code run at a level below the one it needs.
    """
    allowed = [probed for probed in probes if probed.asked <= _HIGHEST[trust]]
    level = max((probed.level for probed in allowed), default=0)
    missing = "; ".join(f"level {p.asked}: {p.why}" for p in allowed if p.asked > level and p.why)
    if level < MIN_LEVEL[trust] and not (unsafe and level):
        return LevelChoice(0, missing or "nothing was tried")
    return LevelChoice(level, missing)
