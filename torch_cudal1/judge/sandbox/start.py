"""Starts a confined process: limits and a level become a plan, a scratch folder with the right
owner, and a launcher's command.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.sandbox.confine import process_identity
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.sandbox.filesystem_policy import allow_access, is_open_to_all, list_roots
from torch_cudal1.judge.sandbox.limits import Limits

__all__ = ["end_process", "launch_process", "make_scratch", "plan_launch"]

_ROOMY_BYTES = 8 << 30
_GRACE_S = 5.0
_UIDS = range(61184, 65520)  # what systemd sets apart for users made for a moment
_DAC_OVERRIDE, _DAC_READ_SEARCH, _KEPT_OWN = (
    1,
    2,
    (0, 1, 2, 3),
)  # own code of root: chown, file permissions
_SETUID = 7
_OPEN_FILES = 4096


def make_scratch(prefix: str = "cudal1-judge-") -> Path:
    """A fresh folder of this user only. Raises SandboxError."""
    shared = Path("/dev/shm")  # memory, not disk, where there is enough of it
    try:
        roomy = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= _ROOMY_BYTES
        return Path(tempfile.mkdtemp(prefix=prefix, dir=shared if roomy else None))
    except OSError as error:
        raise SandboxError("starting", f"no scratch folder: {error}") from error


def plan_launch(
    limits: Limits,
    level: int,
    scratch: Path,
    variables: Mapping[str, str],
    *,
    watched: bool = False,
) -> LaunchPlan:
    """How a child of this level is started, by a tool if `watched`. A user of its own is given the
    scratch folder.
    """
    rlimits = {"CORE": 0, "FSIZE": limits.file_bytes}
    if level < 2:
        return LaunchPlan(os.getpid(), str(scratch), rlimits=rlimits)
    own = limits.trust == "own"
    reached = allow_access(scratch, variables, own=own, gpu=limits.gpu, watched=watched)
    if own:
        return LaunchPlan(os.getpid(), str(scratch), reached, keep=_KEPT_OWN, rlimits=rlimits)
    uid = _strangers_uid(scratch)
    closed = uid is not None and not all(
        is_open_to_all(path, with_parents=level < 3) for path in _vital()
    )
    return LaunchPlan(
        os.getpid(),
        str(scratch),
        reached,
        uid,
        _way_in() if closed else (),
        own=False,
        namespaces=level >= 3,
        rlimits=rlimits | {"NOFILE": _OPEN_FILES},
        processes=256 + 8 * (os.cpu_count() or 1),
    )


def launch_process(
    plan: LaunchPlan,
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    fds: Sequence[int],
    log: IO[bytes],
) -> subprocess.Popen[bytes]:
    """Start `command` as the plan says; the result is its supervisor, see
    `judge.sandbox.confine.__main__`. Raises SandboxError.
    """
    launcher = [
        sys.executable,
        "-S",
        "-P",
        "-m",
        "torch_cudal1.judge.sandbox.confine",
        plan.to_json(),
        *command,
    ]
    try:
        return subprocess.Popen(
            launcher,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=plan.scratch,
            env=dict(variables),
            pass_fds=tuple(fds),
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError("starting", f"{' '.join(command)}: {error}") from error


class Process(Protocol):
    """What `end_process` asks of a process."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self, timeout: float) -> int: ...
    def kill(self) -> None: ...


def end_process(process: Process) -> None:
    """Have the supervisor kill everything and end; if it does not, kill it, and the system kills
    its child. Safe to call twice.
    """
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        with_group = process.pid
        try:
            os.killpg(with_group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.kill()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            # in an uninterruptible driver call: it dies when that returns, and answers nobody
            return


def _strangers_uid(scratch: Path) -> int | None:
    """A user nobody else is, owner of the scratch folder from now on, when root starts the child;
    None: the user stays.
    """
    if os.geteuid() != 0 or not process_identity.read_capabilities() >> _SETUID & 1:
        return None
    uid = _UIDS[secrets.randbelow(len(_UIDS))]
    os.chown(scratch, uid, -1)
    scratch.chmod(0o770)  # the group stays the judge's
    return uid


def _way_in() -> tuple[int, ...]:
    """The capability by which a stranger's user comes to a Python that only root may enter (below
    /root, say).

    Landlock still says which files. Docker gives root no DAC_READ_SEARCH, but DAC_OVERRIDE.
    """
    return (
        (_DAC_READ_SEARCH,)
        if process_identity.read_capabilities() >> _DAC_READ_SEARCH & 1
        else (_DAC_OVERRIDE,)
    )


def _vital() -> list[str]:
    return [sys.executable, os.__file__, __file__, *list_roots()]
