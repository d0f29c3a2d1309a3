"""The launcher, `python -S -P -m torch_cudal1.judge.sandbox.confine PLAN COMMAND...`: starts
COMMAND confined as the plan says, and supervises it.

    judge -> supervisor (this process) -> worker                          without namespaces
    judge -> supervisor -> first process of the namespaces -> worker      with them

The supervisor kills every process that the worker started, and then ends with the worker's exit
status or signal. SIGTERM, or the end of the judge, makes it end at once. It prints the last 64 KiB
of the worker's output. Exit code 125: the process could not be confined, and the output says why.
The supervisor itself is not confined; from level 2 on, the worker cannot reach it.
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
    """Start the command and supervise it; end this process as the worker ended."""
    # Before the first fork: a worker that ends at once must find the SIGCHLD handler in place.
    watch = Supervisor(polite=plan.own)
    # Every process below inherits the limit. A core dump is as large as the memory of its process,
    # which holds the inputs.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if kernel.LINUX:
        process_identity.die_with_parent(signal.SIGTERM)
        # The judge may have died before the call above; its death then sends no signal any more.
        if os.getppid() != plan.parent:
            raise SystemExit("the judge is gone")
        # A daemon (double fork, new session) becomes a child of this process instead of process 1,
        # so it can be found and killed.
        kernel.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    report = os.pipe()
    output = os.pipe()
    child = (
        _fork_first_process(plan, command, output[1], report)
        if plan.namespaces
        else _fork_worker(plan, command, output[1])
    )
    # The pipes report their end only when no process holds a writing end, this one included.
    for fd in (output[1], report[1]):
        os.close(fd)
    if kernel.LINUX:
        # A worker of the same user could otherwise ptrace this process and read its /proc files.
        # Only now: root owns /proc/self/uid_map of a process that is not dumpable, and
        # enter_namespaces writes it.
        kernel.prctl(_PR_SET_DUMPABLE, 0)
    status = watch.wait_for_end(child, output[0])
    report_bytes = b"" if watch.is_terminated else os.read(report[0], 4)
    os.write(1, bytes(watch.tail))
    end_like(struct.unpack("i", report_bytes)[0] if report_bytes else status)


def _fork_first_process(
    plan: LaunchPlan, command: list[str], output: int, report: tuple[int, int]
) -> int:
    """Fork the first process of the new namespaces, and return its process id.

    That process starts the worker, reaps orphans, and writes the worker's wait status to the pipe
    `report`.
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
    # These handlers belong to the supervisor: they would write to its wake-up pipe.
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    try:
        assert plan.reach is not None
        namespaces.build_root(plan.reach, plan.scratch)
    except OSError as error:
        _refuse("the root of its namespace", error, output)
    # Forked after the new root is in place: the worker never sees the old one.
    worker = _fork_worker(plan, command, output)
    os.close(output)
    while True:
        ended, status = os.wait()
        if ended == worker:
            os.write(report[1], struct.pack("i", status))
            # When process 1 of a pid namespace ends, the kernel kills all others in it.
            os._exit(0)


def _fork_worker(plan: LaunchPlan, command: list[str], output: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    stage = "starting"
    try:
        # Until execv this process still has the supervisor's handlers, and must not write to its
        # wake-up pipe.
        signal.set_wakeup_fd(-1)
        # Python ignores SIGPIPE and SIGXFSZ, and ignored signals stay ignored after execv:
        # compilers would not end with a closed pipe, nor at the limit on file sizes.
        for number in (
            signal.SIGTERM,
            signal.SIGCHLD,
            signal.SIGPIPE,
            signal.SIGXFSZ,
        ):
            signal.signal(number, signal.SIG_DFL)
        # A signal to the worker's own process group (kill with pid 0) then misses the supervisor.
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
    """The steps that confine the worker, as (name, function), in the order in which they must run:
    a step may take away the right to do an earlier one.
    """
    yield "resource limits", lambda: process_identity.set_limits(plan.rlimits, plan.processes)
    if not kernel.LINUX:
        return
    if plan.reach is not None:
        yield "dropping privileges", lambda: process_identity.drop_privileges(plan.uid, plan.keep)
    # Linux clears this setting when a process changes its user, so it follows dropping privileges.
    yield "tying it to its supervisor", lambda: process_identity.die_with_parent(signal.SIGKILL)
    if plan.reach is None:
        return
    reach = plan.reach
    # Without CAP_SYS_ADMIN, which is gone by now, Linux accepts Landlock rules and filters only
    # from a process that cannot gain privileges by a set-uid program.
    yield "no_new_privs", lambda: kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    yield "Landlock", lambda: landlock.restrict(reach)
    yield (
        "the system-call filter",
        lambda: seccomp.install_filter(
            seccomp.list_rules("build", own=plan.own), all_threads=False
        ),
    )


def _refuse(stage: str, error: OSError, output: int = 2) -> NoReturn:
    # os._exit: this process is a fork, and an exception would run the supervisor's code in it.
    os.write(output, f"{stage}: {error}\n".encode())
    os._exit(REFUSED)


if __name__ == "__main__":
    main(LaunchPlan.from_json(sys.argv[1]), sys.argv[2:])
