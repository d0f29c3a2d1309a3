"""The launcher: a filter that refuses exactly what it lists, a supervisor that leaves nothing, an
end that is told truly.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_cudal1.judge.sandbox.confine import landlock, process_identity, seccomp
from torch_cudal1.judge.sandbox.confine.landlock import FilesystemAccess
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.sandbox.start import end_process, launch_process

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
ALLOWED = 0x7FFF0000
UNIX, INET = 1, 2
STREAM, DATAGRAM, CLOEXEC = 1, 2, 0x80000
THREAD, NEWUSER = 0x3D0F00, 0x10000000 | signal.SIGCHLD
ME, OTHER = 4711, 1
CALLS = [  # phase, whose code, number, arguments, what comes of it (0: allowed)
    ("build", "own", 0, (), 0),  # read
    ("build", "own", 101, (), errno.EPERM),  # ptrace
    ("build", "own", 0x40000000, (), errno.ENOSYS),  # the x32 way to read
    ("build", "own", 41, (UNIX, STREAM | CLOEXEC), 0),
    ("build", "own", 41, (UNIX, DATAGRAM), 0),
    ("build", "own", 41, (INET, STREAM), errno.EACCES),
    ("build", "own", 41, (16, 3), errno.EACCES),  # netlink
    ("build", "own", 42, (), 0),  # connect
    ("build", "foreign", 42, (), errno.EACCES),
    ("build", "foreign", 41, (UNIX, STREAM | CLOEXEC), 0),
    ("build", "foreign", 41, (UNIX, 5), 0),
    ("build", "foreign", 41, (UNIX, DATAGRAM | CLOEXEC), errno.EACCES),
    ("build", "foreign", 59, (), 0),  # execve
    ("build", "foreign", 57, (), 0),  # fork
    ("build", "foreign", 56, (THREAD,), 0),  # clone
    ("build", "foreign", 56, (signal.SIGCHLD,), 0),
    ("build", "foreign", 56, (NEWUSER,), errno.EPERM),
    ("build", "foreign", 435, (), errno.ENOSYS),  # clone3
    ("build", "foreign", 302, (0,), 0),  # prlimit64
    ("build", "foreign", 302, (OTHER,), errno.EPERM),
    ("build", "foreign", 272, (), errno.EPERM),  # unshare
    ("run", "foreign", 59, (), errno.EPERM),
    ("run", "foreign", 322, (), errno.EPERM),  # execveat
    ("run", "foreign", 57, (), errno.EPERM),
    ("run", "foreign", 56, (THREAD,), 0),
    ("run", "foreign", 56, (signal.SIGCHLD,), errno.EPERM),
    ("run", "foreign", 62, (ME,), 0),  # kill
    ("run", "foreign", 62, (OTHER,), errno.EPERM),
    ("run", "foreign", 62, (-1,), errno.EPERM),
    ("run", "foreign", 234, (ME,), 0),  # tgkill
    ("run", "foreign", 1, (), 0),  # write
]


def outcome(
    code: tuple[seccomp.Instruction, ...],
    number: int,
    args: tuple[int, ...],
    arch: int = 0xC000003E,
) -> int:
    """What classic BPF makes of a call: 0 allowed, else the error number. Written from the kernel's
    description of the machine.
    """
    words = {0: number & 0xFFFFFFFF, 4: arch}
    for index in range(6):
        value = args[index] if index < len(args) else 0
        words |= {16 + 8 * index: value & 0xFFFFFFFF, 20 + 8 * index: (value >> 32) & 0xFFFFFFFF}
    at = accumulator = 0
    while True:
        op, yes, no, constant = code[at]
        at += 1
        match op:
            case 0x20:
                accumulator = words[constant]
            case 0x15 | 0x35 | 0x45:
                met = {
                    0x15: accumulator == constant,
                    0x35: accumulator >= constant,
                    0x45: bool(accumulator & constant),
                }[op]
                at += yes if met else no
            case 0x06:
                return 0 if constant == ALLOWED else constant & 0xFFFF
            case _:
                raise AssertionError(f"no such instruction {op:#x}")


@pytest.mark.parametrize(("phase", "whose", "number", "args", "expected"), CALLS)
def test_the_filter_refuses_what_it_lists_and_nothing_else(
    phase: seccomp.Phase, whose: str, number: int, args: tuple[int, ...], expected: int
) -> None:
    own = whose == "own"
    filters = [seccomp.list_rules("build", own=own)] + (
        [seccomp.list_rules("run", own=own, pid=ME)] if phase == "run" else []
    )
    found = [outcome(seccomp.assemble_filter(rules), number, args) for rules in filters]
    assert (
        max(found) == expected
    )  # the strictest of the filters that lie on top of each other decides


def test_a_call_by_another_architectures_numbers_is_refused() -> None:
    assert (
        outcome(
            seccomp.assemble_filter(seccomp.list_rules("build", own=True)), 0, (), arch=0x40000003
        )
        == errno.ENOSYS
    )


def test_a_filter_has_room_for_its_jumps() -> None:
    for phase in ("build", "run"):
        code = seccomp.assemble_filter(seccomp.list_rules(phase, own=False))
        assert len(code) < 4096
        assert all(0 <= yes < 256 and 0 <= no < 256 for _, yes, no, _ in code)


def test_the_digest_tells_filters_apart_and_not_processes() -> None:
    digests = {
        seccomp.digest_filter(seccomp.list_rules(phase, own=own))
        for phase in ("build", "run")
        for own in (True, False)
    }
    assert len(digests) == 3  # what "run" adds is alike for both
    assert seccomp.digest_filter(seccomp.list_rules("run", own=True)) != seccomp.digest_filter(
        seccomp.list_rules("run", own=True, pid=ME)
    )


def test_a_plan_survives_the_command_line() -> None:
    plan = LaunchPlan(
        7,
        "/s",
        FilesystemAccess(("/usr",), ("/x",), ("/s",), ("/dev/null",)),
        61200,
        (2,),
        False,
        True,
        {"CORE": 0},
        300,
    )
    assert LaunchPlan.from_json(plan.to_json()) == plan
    assert LaunchPlan.from_json(LaunchPlan(7, "/s").to_json()) == LaunchPlan(7, "/s")


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cudal1-test-") as folder:
        yield Path(folder)


def variables() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(landlock.__file__).parents[2]), "PATH": "/usr/bin:/bin"}


def ran(
    scratch: Path, code: str, plan: LaunchPlan | None = None, *, stop_after_s: float = 0.0
) -> tuple[int, bytes, float]:
    """Exit code, output and seconds of Python code under the launcher; told to stop after a while
    if that is not 0.
    """
    with tempfile.TemporaryFile() as log:
        begin = time.monotonic()
        process = launch_process(
            plan or LaunchPlan(os.getpid(), str(scratch)),
            [sys.executable, "-S", "-c", code],
            variables(),
            fds=(),
            log=log,
        )
        if stop_after_s:
            time.sleep(stop_after_s)
            end_process(process)
        code_of_end = process.wait(60)
        log.seek(0)
        return code_of_end, log.read(), time.monotonic() - begin


ENDS = {
    "import os; os._exit(0)": 0,
    "import os; os._exit(3)": 3,
    "import os; os.kill(os.getpid(), 11)": -11,
    "import os; os.kill(os.getpid(), 9)": -9,
    "import ctypes; ctypes.string_at(0)": -11,
    "raise SystemExit('last words')": 1,
}


@linux
@pytest.mark.parametrize("code", ENDS)
def test_the_supervisor_ends_as_its_child_did(scratch: Path, code: str) -> None:
    status, output, _ = ran(scratch, code)
    assert status == ENDS[code]
    assert (b"last words" in output) == ("last words" in code)


@linux
def test_a_flood_of_output_keeps_its_end_only(scratch: Path) -> None:
    flood = "import os\nfor _ in range(2000): os.write(1, b'x' * 100_000)\nos.write(1, b'the end')"
    status, output, _ = ran(scratch, flood)
    assert status == 0
    assert len(output) <= 64 << 10
    assert output.endswith(b"the end")


ESCAPES = {
    "child": "os.fork() or hold()",
    "session": "os.fork() or (os.setsid(), hold())",
    "orphan": "os.fork() or (os.setsid(), os.fork() and os._exit(0), hold())",
    "deaf": "os.fork() or (signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.signal(signal.SIGHUP, signal.SIG_IGN), hold())",
}
HOLD = """
import fcntl, os, signal, time
def hold():
    lock = os.open("lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    open("ready", "w").close()
    time.sleep(600)
"""


def is_free(lock: Path) -> bool:
    import fcntl

    with open(lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@linux
@pytest.mark.parametrize("how", ESCAPES)
@pytest.mark.parametrize("stopped", [False, True], ids=["at its own end", "when told to stop"])
def test_no_process_outlives_its_supervisor(scratch: Path, how: str, stopped: bool) -> None:
    after = (
        "time.sleep(600)" if stopped else "\nwhile not os.path.exists('ready'): time.sleep(0.01)"
    )
    ran(scratch, f"{HOLD}\n{ESCAPES[how]}\n{after}", stop_after_s=2.0 if stopped else 0.0)
    assert (scratch / "ready").exists()
    assert is_free(scratch / "lock")


@linux
def test_what_code_of_ours_started_may_end_by_itself(scratch: Path) -> None:
    """As the pool of a compiler does, which removes its semaphores when its pipe is closed."""
    tidy = "os.close(w); os.read(r, 1); open('tidy', 'w').close(); os._exit(0)"
    pool = f"import os\nr, w = os.pipe()\nif os.fork() == 0: {tidy}\nos.close(r)"
    ran(scratch, f"{pool}\nimport time; time.sleep(600)", stop_after_s=2.0)
    assert (scratch / "tidy").exists()


@linux
def test_a_fork_bomb_is_defused(scratch: Path) -> None:
    bomb = (
        HOLD
        + "\nwhile True:\n  try: os.fork()\n  except OSError: open('full', 'w').close(); time.sleep(0.05)"
    )
    plan = LaunchPlan(os.getpid(), str(scratch), uid=None, processes=40)
    before = process_identity.count_threads(os.getuid())
    if os.getuid() == 0:  # the system counts no processes of root's
        scratch.chmod(0o777)
        plan = LaunchPlan(
            os.getpid(),
            str(scratch),
            FilesystemAccess(read=("/",), write=(str(scratch),)),
            uid=61183,
            keep=(1,),
            processes=40,
        )
    _, _, seconds = ran(scratch, bomb, plan, stop_after_s=2.0)
    assert (scratch / "full").exists(), "the limit was never met"
    assert seconds < 30
    assert process_identity.count_threads(61183 if os.getuid() == 0 else os.getuid()) <= (
        0 if os.getuid() == 0 else before + 5
    )


@linux
def test_the_child_dies_with_the_judge(scratch: Path) -> None:
    code = f"""
import os, sys, time
from pathlib import Path
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
import subprocess
plan = LaunchPlan(os.getpid(), {str(scratch)!r}).to_json()
command = [sys.executable, "-S", "-c", {HOLD + "hold()"!r}]
subprocess.Popen([sys.executable, "-S", "-P", "-m", "torch_cudal1.judge.sandbox.confine", plan, *command], cwd={str(scratch)!r})
while not os.path.exists({str(scratch / "ready")!r}): time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-S", "-c", code], env=variables(), timeout=60, check=False)
    until = time.monotonic() + 20
    while not is_free(scratch / "lock") and time.monotonic() < until:
        time.sleep(0.05)
    assert is_free(scratch / "lock")


@linux
def test_a_confinement_that_cannot_be_had_starts_nothing(scratch: Path) -> None:
    plan = LaunchPlan(os.getpid(), str(scratch), rlimits={"NOFILE": 2})
    status, output, _ = ran(scratch, "open('started', 'w')", plan)
    assert status != 0
    assert not (scratch / "started").exists()
    assert output


@linux
@pytest.mark.skipif(not landlock.find_version(), reason="this kernel has no Landlock")
def test_landlock_leaves_what_it_is_told_and_nothing_else(scratch: Path) -> None:
    (scratch / "in").mkdir()
    (scratch / "out").mkdir()
    (scratch / "out" / "file").write_text("secret")
    python = (
        sys.prefix,
        sys.base_prefix,
        "/usr",
        "/lib",
        "/lib64",
        "/bin",
        "/etc/ld.so.cache",
        *variables().values(),
    )
    plan = LaunchPlan(
        os.getpid(),
        str(scratch),
        FilesystemAccess(tuple(p for p in python if p.startswith("/")), (), (str(scratch / "in"),)),
    )
    code = """
import os
open("in/file", "w").write("x")
for what in (lambda: open("out/file"), lambda: open("out/new", "w"), lambda: os.rename("in/file", "out/moved"),
             lambda: os.symlink("/etc/passwd", "out/link"), lambda: os.link("out/file", "in/link"), lambda: os.unlink("out/file")):
    try: what()
    except OSError as error: print(error.errno)
    else: print("DONE")
"""
    status, output, _ = ran(scratch, code, plan)
    assert status == 0, output
    assert {int(line) for line in output.split()} <= {errno.EACCES, errno.EXDEV, errno.EPERM}
    assert (scratch / "out" / "file").read_text() == "secret"
    assert os.listdir(scratch / "out") == ["file"]
