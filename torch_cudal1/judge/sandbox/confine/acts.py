"""One forbidden act for each control, and each act that a candidate needs:
`python -S -P -m torch_cudal1.judge.sandbox.confine.acts ASK`.

Run in the confinement that is to be probed. It prints one JSON object: name of the act -> [whether
it succeeded, a description of the outcome]. A control holds if its forbidden act failed; a need is
met if its act succeeded. Nothing is known about what no act tries (side channels, driver bugs).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch_cudal1.judge.sandbox.confine import gpu, kernel, seccomp

__all__ = ["ACTS", "LOCK_NAME", "NEEDS", "NO_SURVIVORS", "ProbeTargets", "format_targets"]

LOCK_NAME = "lock"  # in the scratch folder: held by a process that tries to outlive its supervisor
NO_SURVIVORS = "no survivors"
_PTRACE_SEIZE, _PTRACE_DETACH = 0x4206, 17
_PR_GET_NO_NEW_PRIVS = 39


@dataclass(frozen=True)
class ProbeTargets:
    """The targets of the acts. The judge sets up those of the forbidden acts outside the sandbox.

    - canary: a file that any user may read. outside: a folder that any user may write.
    - tcp, udp: ports of 127.0.0.1 on which the judge has sockets.
    - abstract: name of a listening abstract socket. path: path of a listening Unix socket.
    - judge: process id of the judge. scratch: the working folder.
    - library: a file of torch. compiler: path of a C++ compiler, or "" where there is none.
    - gpu: whether the child uses the GPU. own: see `seccomp.list_rules`.
    - run: whether the phase is "run". level: the level to probe; acts of higher levels are skipped.
    """

    canary: str
    outside: str
    tcp: int
    udp: int
    abstract: str
    path: str
    judge: int
    scratch: str
    library: str
    compiler: str
    gpu: bool
    own: bool
    run: bool
    level: int


def _read_canary(ask: ProbeTargets) -> str:
    with open(ask.canary) as file:
        return f"read {len(file.read())} characters of {ask.canary}"


def _write_outside(ask: ProbeTargets) -> str:
    with open(os.path.join(ask.outside, "written"), "w") as file:
        file.write("x")
    return f"wrote into {ask.outside}"


def _connect_tcp(ask: ProbeTargets) -> str:
    with socket.create_connection(("127.0.0.1", ask.tcp), 1.0):
        return f"connected to 127.0.0.1:{ask.tcp}"


def _send_udp(ask: ProbeTargets) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", ("127.0.0.1", ask.udp))
        return f"sent a datagram to 127.0.0.1:{ask.udp}"


def _connect_unix(address: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        sock.connect(address)
        return "connected to a socket outside"


def _signal_judge(ask: ProbeTargets) -> str:
    # Signal 0 makes the permission check of kill(2) and delivers nothing.
    os.kill(ask.judge, 0)
    return "could have signalled the judge"


def _attach_to_judge(ask: ProbeTargets) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    # PTRACE_ATTACH would stop the judge; PTRACE_SEIZE does not.
    kernel.check_result(libc.ptrace(_PTRACE_SEIZE, ask.judge, None, None), "ptrace")
    libc.ptrace(_PTRACE_DETACH, ask.judge, None, None)
    return "attached to the judge"


def _read_judge_memory(ask: ProbeTargets) -> str:
    for name in ("environ", "maps", "mem"):
        try:
            with open(f"/proc/{ask.judge}/{name}", "rb") as file:
                # Opening mem is the permission check. Its first page is not mapped, so a read fails
                # anyway.
                if name == "mem" or file.read(1):
                    return f"opened /proc/{ask.judge}/{name}"
        except OSError:
            continue
    raise OSError(errno.EACCES, "no file of the judge's under /proc opens")


def _shrink(ask: ProbeTargets) -> str:
    limits = resource.prlimit(ask.judge, resource.RLIMIT_CORE)
    # Sets the limits that are in force: the permission is tested, the judge is left as it was.
    resource.prlimit(ask.judge, resource.RLIMIT_CORE, limits)
    return "could have changed the judge's limits"


def _regain(_: ProbeTargets) -> str:
    if not kernel.prctl(_PR_GET_NO_NEW_PRIVS):
        return "may gain privileges by executing a set-uid program"
    # setuid(0) always succeeds for root, so it would test nothing.
    if os.getuid() == 0:
        raise OSError(errno.EPERM, "no_new_privs is set")
    os.setuid(0)
    return "became root"


def _namespace(_: ProbeTargets) -> str:
    # CLONE_NEWUSER: the only namespace that a user may make without a capability.
    kernel.unshare(0x10000000)
    return "made a user namespace"


def _exec(_: ProbeTargets) -> str:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return "started a process"


def _execute(_: ProbeTargets) -> str:
    try:
        # The filter refuses the call before the kernel looks for the file, so "not found" means
        # that the call was allowed.
        os.execv("/nonexistent", ["x"])
    except FileNotFoundError:
        return "could have executed a program"
    raise AssertionError("unreachable")


def _big_file(ask: ProbeTargets) -> str:
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size == resource.RLIM_INFINITY:
        return "files have no limit"
    # The write then fails with EFBIG instead of killing the probe.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open(os.path.join(ask.scratch, "big"), "wb") as file:
        # At the offset of the limit: the file is sparse and takes no space.
        os.pwrite(file.fileno(), b"x", size)
        return f"wrote past {size} bytes"


def _open_files(_: ProbeTargets) -> str:
    # listdir opens a descriptor of its own, which is closed again when its name is tested.
    inherited = [
        name
        for name in os.listdir("/proc/self/fd")
        if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")
    ]
    if not inherited:
        raise OSError(errno.EBADF, "only standard input and output are open")
    return f"inherited files {inherited}"


def _survive(ask: ProbeTargets) -> str:
    """Leave behind a grandchild in its own session that holds a lock. The judge tests the lock
    after the supervisor has ended: a free lock shows that the grandchild was killed.
    """
    ready = os.pipe()
    # A double fork with a new session: a kill of the process group would miss the grandchild.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            lock = os.open(os.path.join(ask.scratch, LOCK_NAME), os.O_CREAT | os.O_RDWR)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(ready[1], b"x")
            signal.pause()
        os._exit(0)
    # The lock must be held before the probe ends, or a free lock would prove nothing.
    os.read(ready[0], 1)
    for fd in ready:
        os.close(fd)
    return "left a process behind"


def _see_process(ask: ProbeTargets) -> str:
    with open(f"/proc/{ask.judge}/cmdline", "rb") as file:
        return f"read the judge's command line, {len(file.read())} bytes"


def _see_file(ask: ProbeTargets) -> str:
    os.stat(ask.canary)
    return f"knows that {ask.canary} exists"


def _see_network(_: ProbeTargets) -> str:
    with open("/proc/self/net/dev") as file:
        names = [line.split(":")[0].strip() for line in file if ":" in line]
    if names in ([], ["lo"]):
        raise OSError(errno.ENODEV, "no interface but loopback")
    return f"sees the interfaces {names}"


def _write_scratch(ask: ProbeTargets) -> str:
    with open(os.path.join(ask.scratch, "small"), "w") as file:
        file.write("x")
    return "wrote into the scratch folder"


def _read_library(ask: ProbeTargets) -> str:
    with open(ask.library, "rb") as file:
        file.read(1)
    # Not imported so far, so this import reads files of the standard library.
    import decimal

    return f"read torch and {decimal.__name__}"


def _thread(_: ProbeTargets) -> str:
    results: list[int] = []
    thread = threading.Thread(target=results.append, args=(1,))
    thread.start()
    thread.join(5.0)
    if not results:
        raise OSError(errno.EAGAIN, "the thread did not run")
    return "ran a thread"


def _compile(ask: ProbeTargets) -> str:
    if not ask.compiler:
        return "no compiler to try"
    library = os.path.join(ask.scratch, "made.so")
    command = [ask.compiler, "-shared", "-fPIC", "-fopenmp", "-x", "c++", "-", "-o", library]
    # Headers, OpenMP and linking a shared library are what Inductor's C++ kernels need.
    text = '#include <omp.h>\n#include <cmath>\nextern "C" int two() { return omp_get_max_threads() > 0 ? 2 : 3; }'
    completed = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, check=False
    )
    if completed.returncode or ctypes.CDLL(library).two() != 2:
        raise OSError(errno.ENOEXEC, f"{ask.compiler}: {completed.stderr[-300:]}")
    return f"compiled with {ask.compiler}"


def _gpu(ask: ProbeTargets) -> str:
    """Use the GPU in this process. For own code in the build phase, also use it in a forked
    process: Inductor's compile workers are processes that start CUDA too.
    """
    if not ask.gpu:
        return "no GPU to try"
    # Before libcuda is initialised: a fork of a process that has initialised it cannot use CUDA.
    worker = os.fork() if ask.own and not ask.run else None
    if worker == 0:
        os._exit(_status_of(gpu.use_gpu))
    outcome = gpu.use_gpu()
    if worker and os.waitpid(worker, 0)[1]:
        raise OSError(errno.EIO, "it can be used here, and not in a process that was started here")
    return outcome


def _status_of(use: Callable[[], object]) -> int:
    try:
        use()
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


Act = Callable[[ProbeTargets], str]
# Control -> the lowest level that promises it, and its forbidden act.
ACTS: dict[str, tuple[int, Act]] = {
    "closed files": (1, _open_files),
    "file size": (1, _big_file),
    NO_SURVIVORS: (1, _survive),
    "reading files": (2, _read_canary),
    "writing files": (2, _write_outside),
    "TCP": (2, _connect_tcp),
    "UDP": (2, _send_udp),
    "abstract sockets": (2, lambda ask: _connect_unix("\0" + ask.abstract)),
    "sockets with a path": (2, lambda ask: _connect_unix(ask.path)),
    "signals": (2, _signal_judge),
    "ptrace": (2, _attach_to_judge),
    "the judge's memory": (2, _read_judge_memory),
    "the judge's limits": (2, _shrink),
    "privileges": (2, _regain),
    "new namespaces": (2, _namespace),
    "new processes": (2, _exec),
    "new programs": (2, _execute),
    "hidden processes": (3, _see_process),
    "hidden files": (3, _see_file),
    "hidden network": (3, _see_network),
}
NEEDS: dict[str, Act] = {
    "scratch": _write_scratch,
    "libraries": _read_library,
    "compiling": _compile,
    "threads": _thread,
    "GPU": _gpu,
}
# These acts come first: "closed files" before the GPU act, since CUDA's driver keeps a dozen files
# open, and the rest before the filter of the run phase, under which they could not be tried.
_FIRST = ("closed files", "scratch", "libraries", "compiling", NO_SURVIVORS)
_RUN_ONLY = ("new processes", "new programs")
# Own code may talk to daemons: CUDA MPS is reached over a socket with a path.
_OWN_MAY = ("sockets with a path",)


def main(ask: ProbeTargets) -> None:
    """Try every act: first `_FIRST`, then the rest, in the run phase under its filter."""
    forbidden = {name: act for name, (level, act) in ACTS.items() if level <= ask.level}
    for name in (*(_RUN_ONLY if not ask.run else ()), *(_OWN_MAY if ask.own else ())):
        forbidden.pop(name, None)
    outcomes = {name: _try_act((NEEDS | forbidden)[name], ask) for name in _FIRST}
    if ask.run and ask.level > 1:
        seccomp.install_filter(
            seccomp.list_rules("run", own=ask.own, pid=os.getpid()), all_threads=True
        )
    outcomes |= {
        name: _try_act(act, ask) for name, act in (NEEDS | forbidden).items() if name not in _FIRST
    }
    print(json.dumps(outcomes))


def _try_act(act: Act, ask: ProbeTargets) -> tuple[bool, str]:
    try:
        return True, act(ask)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return False, f"{type(error).__name__}: {error}"


def format_targets(ask: ProbeTargets) -> str:
    """The command line argument for these acts."""
    return json.dumps(asdict(ask))


if __name__ == "__main__":
    _arguments: dict[str, Any] = json.loads(sys.argv[1])
    main(ProbeTargets(**_arguments))
