"""The launcher, `python -S -P -m torch_cudal1.judge.sandbox.confine PLAN COMMAND...`: starts
COMMAND confined as the plan says, and watches it.

    judge -> supervisor (this process) -> worker                          without namespaces
    judge -> supervisor -> first process of the namespaces -> worker      with them

The supervisor ends when the worker does, in the same way, and then nothing the worker started is
left; SIGTERM, or the end of the judge, makes it end at once. Its own output is the end of the
worker's. Exit code 125: the confinement could not be had, the output says why. The supervisor is
not confined: the worker must not be able to reach it, which is what the levels are for.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from torch_cudal1.judge.sandbox.confine import (
    kernel,
    landlock,
    namespaces,
    process_identity,
    seccomp,
)
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.sandbox.confine.supervise import Supervisor, end_like

REFUSED = 125
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 4, 38, 36


def main(plan: LaunchPlan, command: list[str]) -> NoReturn:
    """Start, watch, end."""
    watch = Supervisor(polite=plan.own)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if kernel.LINUX:
        process_identity.die_with_parent(signal.SIGTERM)
        if os.getppid() != plan.parent:
            raise SystemExit("the judge is gone")
        kernel.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    report = os.pipe()
    output = os.pipe()
    child = (
        _first(plan, command, output[1], report)
        if plan.namespaces
        else _fork_worker(plan, command, output[1])
    )
    for fd in (output[1], report[1]):
        os.close(fd)
    if kernel.LINUX:
        kernel.prctl(_PR_SET_DUMPABLE, 0)  # one user's processes may otherwise look into each other
    status = watch.until_end(child, output[0])
    report_bytes = b"" if watch.told else os.read(report[0], 4)
    os.write(1, bytes(watch.tail))
    end_like(struct.unpack("i", report_bytes)[0] if report_bytes else status)


def _first(plan: LaunchPlan, command: list[str], output: int, report: tuple[int, int]) -> int:
    """Fork the process that is number 1 in the new namespaces: it starts the worker, reaps orphans
    and reports how it ended.
    """
    try:
        namespaces.enter_namespaces()
    except OSError as error:
        _refuse("namespaces", error)
    pid = os.fork()
    if pid:
        return pid
    os.close(report[0])
    process_identity.die_with_parent(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    try:
        assert plan.reach is not None
        namespaces.build_root(plan.reach, plan.scratch)
    except OSError as error:
        _refuse("the root of its namespace", error, output)
    worker = _fork_worker(plan, command, output)
    os.close(output)
    while True:
        ended, status = os.wait()
        if ended == worker:
            os.write(report[1], struct.pack("i", status))
            os._exit(0)  # with number 1 everything in the namespace dies


def _fork_worker(plan: LaunchPlan, command: list[str], output: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    stage = "starting"
    try:
        signal.set_wakeup_fd(-1)
        for number in (
            signal.SIGTERM,
            signal.SIGCHLD,
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ):  # Python ignores the last two
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        for name, step in _steps(plan):
            stage = name
            step()
        stage = f"executing {command[0]}"
        os.execv(command[0], command)
    except OSError as error:
        _refuse(stage, error)


def _steps(plan: LaunchPlan) -> Iterator[tuple[str, Callable[[], object]]]:
    """What the worker does to itself, in the only order that works: each step may take away the
    right to the one before it.
    """
    yield "resource limits", lambda: process_identity.set_limits(plan.rlimits, plan.processes)
    if not kernel.LINUX:
        return
    if plan.reach is not None:
        yield "dropping privileges", lambda: process_identity.drop_privileges(plan.uid, plan.keep)
    yield "tying it to its supervisor", lambda: process_identity.die_with_parent(signal.SIGKILL)
    if plan.reach is None:
        return
    reach = plan.reach
    yield "no_new_privs", lambda: kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    yield "Landlock", lambda: landlock.restrict(reach)
    yield (
        "the system-call filter",
        lambda: seccomp.install_filter(
            seccomp.list_rules("build", own=plan.own), all_threads=False
        ),
    )


def _refuse(stage: str, error: OSError, output: int = 2) -> NoReturn:
    os.write(output, f"{stage}: {error}\n".encode())
    os._exit(REFUSED)


if __name__ == "__main__":
    main(LaunchPlan.from_json(sys.argv[1]), sys.argv[2:])
