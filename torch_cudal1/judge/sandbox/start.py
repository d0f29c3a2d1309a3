"""Starts a confined process: turns limits and a level into a launch plan, gives the scratch folder
its owner, and runs the launcher.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.sandbox.confine import process_identity
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.sandbox.filesystem_policy import allow_access, is_open_to_all, list_roots
from torch_cudal1.judge.sandbox.limits import Limits

__all__ = ["end_process", "launch_process", "plan_launch"]

_GRACE_S = 5.0
# The range that systemd reserves for dynamic users: no account has these numbers.
_UIDS = range(61184, 65520)
# Own code that root starts keeps CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER.
_DAC_OVERRIDE, _DAC_READ_SEARCH, _KEPT_OWN = (
    1,
    2,
    (0, 1, 2, 3),
)
_SETUID = 7
_OPEN_FILES = 4096


def plan_launch(
    limits: Limits,
    level: int,
    scratch: Path,
    variables: Mapping[str, str],
    *,
    watched: bool = False,
) -> LaunchPlan:
    """The launch plan of a child at this level. Where it gets a user of its own, the scratch folder
    is given to that user. `watched`: a tool starts the worker.
    """
    rlimits = {"CORE": 0, "FSIZE": limits.file_bytes}
    if level < 2:
        return LaunchPlan(os.getpid(), str(scratch), rlimits=rlimits)
    own = limits.trust == "own"
    reached = allow_access(scratch, variables, own=own, gpu=limits.gpu, watched=watched)
    if own:
        return LaunchPlan(os.getpid(), str(scratch), reached, keep=_KEPT_OWN, rlimits=rlimits)
    uid = _choose_unused_uid(scratch)
    # At level 3 the child sees mounts of these folders, so the permissions above them do not
    # matter.
    closed = uid is not None and not all(
        is_open_to_all(path, with_parents=level < 3) for path in _list_required_paths()
    )
    return LaunchPlan(
        os.getpid(),
        str(scratch),
        reached,
        uid,
        _choose_capabilities() if closed else (),
        own=False,
        namespaces=level >= 3,
        rlimits=rlimits | {"NOFILE": _OPEN_FILES},
        # Stops fork bombs.
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
    """Start `command` as the plan says; its supervisor (`judge.sandbox.confine.__main__`).

    `fds`: descriptors that the command inherits. `log`: takes its output. Raises SandboxError.
    """
    # -S: no site-packages, which would be imported first; -P: no module of the working folder,
    # which a candidate writes.
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
            # Ctrl-C in the terminal goes to the judge only, which then ends its children in order.
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError("starting", f"{' '.join(command)}: {error}") from error


class Process(Protocol):
    """The methods of `subprocess.Popen` that `end_process` needs."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self, timeout: float) -> int: ...
    def kill(self) -> None: ...


def end_process(process: Process) -> None:
    """Have the supervisor kill all its descendants and end; kill it if it does not, whereupon Linux
    kills its child. Safe to call twice.
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
            # In an uninterruptible driver call: it dies when the call returns.
            return


def _choose_unused_uid(scratch: Path) -> int | None:
    """A random unused user id, which now owns the scratch folder, where root starts the child; else
    None, and the user stays.
    """
    # Root in a container may lack CAP_SETUID.
    if os.geteuid() != 0 or not process_identity.read_capabilities() >> _SETUID & 1:
        return None
    uid = _UIDS[secrets.randbelow(len(_UIDS))]
    os.chown(scratch, uid, -1)
    # The group stays the judge's, which reads and deletes the folder.
    scratch.chmod(0o770)
    return uid


def _choose_capabilities() -> tuple[int, ...]:
    """The capability with which the child's user reaches a Python that only root may reach, such as
    one below /root. Landlock still decides which files.
    """
    return (
        # The weaker one, where root has it: Docker gives root DAC_OVERRIDE, but not
        # DAC_READ_SEARCH.
        (_DAC_READ_SEARCH,)
        if process_identity.read_capabilities() >> _DAC_READ_SEARCH & 1
        else (_DAC_OVERRIDE,)
    )


def _list_required_paths() -> list[str]:
    return [sys.executable, os.__file__, __file__, *list_roots()]
