"""Source code that nobody vouches for, in the child that judges it: every attack fails, honest work
goes on.
"""

from __future__ import annotations

import fcntl
import os
import socket
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, Limits, make_limits
from torch_cudal1.judge.sandbox.confine import landlock, seccomp
from torch_cudal1.judge.wire.call_spec import CallSpec, pack_arguments
from torch_cudal1.judge.wire.channel import load_tensors, save_tensors

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not landlock.find_version() or not seccomp.is_supported(),
    reason="strangers are refused here: level 1 only",
)
FORM = CallSpec(
    "ModelNew",
    pack_arguments({"args": [], "kwargs": {}}, None),
    (),
    pack_arguments({"args": [torch.ones(1)], "kwargs": {}}, []),
).to_json()
# what the kernel answers
STOPPED = r"(OSError|PermissionError|FileNotFoundError|ProcessLookupError|ValueError): "
# what the source does when it is imported; JUDGE, CANARY, OUTSIDE, PORT and SOCKET are filled in
ATTACKS = {
    "reads a file": "open({canary!r}).read()",
    "lists a folder": "os.listdir({outside!r})",
    "writes a file": "open({outside!r} + '/written', 'w')",
    "deletes a file": "os.unlink({canary!r})",
    "links a file into reach": "os.link({canary!r}, 'linked')",
    "reads a file through a symbolic link": "os.symlink({canary!r}, 'alias'), open('alias').read()",
    "reads the passwords": "open('/etc/shadow').read()",
    "opens a socket": "socket.create_connection(('127.0.0.1', {port}), 1)",
    "sends a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "talks to a daemon": "socket.socket(socket.AF_UNIX).connect({socket!r})",
    "asks for netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "kills the judge": "os.kill({judge}, 9)",
    "kills its supervisor": "os.kill(os.getppid(), 9)",
    "kills everybody": "os.kill(-1, 9)",
    "kills the group of the judge": "os.killpg(os.getpgid({judge}), 9)",
    "kills by a process handle": "signal.pidfd_send_signal(os.pidfd_open({judge}), 9)",
    "starves the judge": "resource.prlimit({judge}, resource.RLIMIT_CPU, (1, 1))",
    "slows the judge down": "os.setpriority(os.PRIO_PROCESS, {judge}, 19)",
    "pins the judge": "os.sched_setaffinity({judge}, {{0}})",
    "marks the judge for the killer": "open('/proc/{judge}/oom_score_adj', 'w').write('1000')",
    "reads the judge's environment": "open('/proc/{judge}/environ').read()",
    "writes the judge's memory": "open('/proc/{judge}/mem', 'r+b')",
    "reads its supervisor's memory": "open(f'/proc/{{os.getppid()}}/mem', 'rb')",
    "forks": "os.fork()",
    "starts a shell": "subprocess.run(['/bin/sh', '-c', 'true'], check=True)",
    "becomes another program": "os.execv('/bin/true', ['true'])",
    "becomes root": "os.setresuid(0, 0, 0)",
    "raises its limits": "resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))",
    "makes a namespace": "check(libc.unshare(0x10000000))",
    "mounts": "check(libc.mount(b'none', b'.', b'tmpfs', 0, None))",
    "traces the judge": "check(libc.ptrace(0x4206, {judge}, None, None))",
    "makes shared memory by key": "check(libc.shmget(77, 4096, 0o1666))",
    "asks for io_uring": "check(libc.syscall(425, 8, ctypes.create_string_buffer(256)))",
    "asks for a BPF map": "check(libc.syscall(321, 0, ctypes.create_string_buffer(128), 128))",
    "forks by a raw call": "check(libc.syscall(435, ctypes.create_string_buffer(88), 88))",
    "lifts the filter": "check(libc.prctl(22, 0, 0, 0, 0))",
}
PREFACE = """
import ctypes, os, resource, signal, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""
HONEST = """
import threading, torch
class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    def forward(self, x):
        return self.layers(x)
def work():
    torch.set_num_threads(2)
    y = ModelNew()(torch.randn(4, 3, 64, 64)).sum()
    y.backward()
    torch.linalg.svd(torch.randn(64, 64))
    thread = threading.Thread(target=lambda: torch.randn(512, 512) @ torch.randn(512, 512))
    thread.start()
    thread.join()
    open("note", "w").write("scratch may be written")
work()
"""


def foreign(deadline_s: float = 60.0, **changes: object) -> Child:
    given: dict[str, object] = {"threads": 2, "trust": "foreign", "phase": "run"} | changes
    return Child(Limits(CPU, deadline_s, **given), Contract())  # type: ignore[arg-type]


def load(child: Child, text: str) -> dict[str, object]:
    return child.call(
        "load_source", slot="candidate", text=textwrap.dedent(text), form=FORM, way={}
    )


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    outside = tmp_path_factory.mktemp("outside")
    for folder in (outside, *outside.parents):
        if folder.name.startswith("pytest"):
            folder.chmod(0o755)
    outside.chmod(0o777)
    canary = outside / "canary"
    canary.write_text("a secret")
    canary.chmod(0o666)
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        path = f"{outside}/s" if len(str(outside)) < 100 else "/tmp/s"
        unix.bind(path)
        os.chmod(path, 0o777)
        tcp.listen()
        unix.listen()
        port = tcp.getsockname()[1]
        yield {
            "canary": str(canary),
            "outside": str(outside),
            "port": port,
            "socket": path,
            "judge": os.getpid(),
        }
    assert canary.read_text() == "a secret"
    assert sorted(os.listdir(outside)) == ["canary", "s"]


@pytest.fixture(scope="module", params=[2, 3], ids=["level 2", "level 3"])
def child(request: pytest.FixtureRequest) -> Iterator[Child]:
    limits = Limits(CPU, 30.0, trust="foreign", phase="run")
    only = probe.probe_level(limits, request.param)
    if only.level < request.param:
        pytest.skip(f"not to be had here: {only.why}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "find_levels", lambda _: (only,))
        with foreign() as running:
            yield running


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attack_on_the_world_outside_fails(
    child: Child, targets: dict[str, object], name: str
) -> None:
    """The attacks share a child: whoever harms it shows in the next."""
    attack = ATTACKS[name].format(**targets)
    with pytest.raises(CandidateFailure, match=STOPPED):
        load(child, f"{PREFACE}\n{attack}\nraise RuntimeError('the attack came through')")
    assert child.usable


def test_honest_work_is_not_disturbed(child: Child) -> None:
    load(child, HONEST)
    assert child.confinement.level >= 2
    assert child.confinement.uid != 0


def test_tensors_travel_both_ways(child: Child) -> None:
    """The child is another user where root starts it; both must be able to write what the other
    reads.
    """
    load(
        child,
        "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x): return x + 1",
    )
    given, back = child.new_file(), child.new_file()
    value = torch.arange(6.0).reshape(2, 3)
    child.call("put", name="set", layout=save_tensors([value], given), path=str(given), base="")
    answer = child.call("run", slot="candidate", inputs="set", path=str(back), hold=False)
    (result,) = load_tensors(answer["layout"], back, CPU)
    assert result is not None
    assert torch.equal(result, value + 1)
    child.call("drop", names=["set"])
    assert not given.exists()


def test_allocating_all_memory_is_a_reason_and_the_next_child_works() -> None:
    limits = make_limits(
        Settings(memory_limit_gib=1.0, candidate_timeout_s=60.0), CPU, trust="foreign", phase="run"
    )
    with Child(limits, Contract()) as child:
        with pytest.raises(CandidateFailure, match="memory") as caught:
            load(child, "import torch\nheld = []\nwhile True: held.append(torch.ones(1 << 24))")
        assert caught.value.detector == "resource"
    with Child(limits, Contract()) as child:
        load(child, HONEST)


def test_strangers_have_a_memory_limit_without_a_setting() -> None:
    assert make_limits(Settings(), CPU, trust="foreign").memory_bytes > 0
    assert make_limits(Settings(), CPU).memory_bytes == 0


def test_printing_without_end_fills_nothing_and_ends_at_the_deadline() -> None:
    with foreign(deadline_s=4.0) as child:
        before = os.fstat(child._log.fileno()).st_size
        with pytest.raises(CandidateFailure, match="deadline") as caught:
            load(child, "while True: print('PASS' * 1000)")
        assert "PASS" in caught.value.found
        assert before == 0
        assert len(str(caught.value)) < 2_000


def test_sleeping_for_ever_ends_at_the_deadline() -> None:
    began = time.monotonic()
    with foreign(deadline_s=3.0) as child, pytest.raises(CandidateFailure, match="deadline"):
        load(child, "import time; time.sleep(3600)")
    assert time.monotonic() - began < 60


def test_a_file_larger_than_allowed_is_an_error() -> None:
    with (
        foreign(file_bytes=1 << 20) as child,
        pytest.raises(CandidateFailure, match=r"File too large|SIGXFSZ"),
    ):
        load(
            child,
            "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nopen('big', 'wb').write(b'x' * (1 << 22))",
        )


def test_a_build_that_leaves_processes_leaves_none() -> None:
    """In the build phase a candidate may start processes; one that hides in a session of its own
    dies with the child.
    """
    text = """
    import fcntl, os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            fcntl.flock(os.open('lock', os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
            open('ready', 'w').close()
            time.sleep(600)
        os._exit(0)
    while not os.path.exists('ready'): time.sleep(0.01)
    raise RuntimeError('left one')
    """
    with foreign(phase="build") as child:
        with pytest.raises(CandidateFailure, match="left one"):
            load(child, text)
        lock = os.open(child.scratch / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody still holds it
    os.close(lock)


def test_a_build_may_compile_with_gcc_and_load_the_result() -> None:
    text = """
    import ctypes, subprocess
    open('two.c', 'w').write('int two(void) { return 2; }')
    subprocess.run(['gcc', '-shared', '-fPIC', 'two.c', '-o', 'two.so'], check=True)
    assert ctypes.CDLL('./two.so').two() == 2
    raise RuntimeError('compiled')
    """
    with foreign(phase="build") as child, pytest.raises(CandidateFailure, match="compiled"):
        load(child, text)


@pytest.mark.parametrize("what", ["pipe", "link", "sparse", "folder"])
def test_what_is_no_plain_file_is_never_read_as_outputs(tmp_path: Path, what: str) -> None:
    layout = save_tensors([torch.ones(3)], tmp_path / "real")
    path = tmp_path / "path"
    if what == "pipe":
        os.mkfifo(path)  # a reader that waits for a writer would wait for ever
    elif what == "link":
        path.symlink_to(tmp_path / "real")
    elif what == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(64 << 30)
    with pytest.raises(SandboxError, match="reading tensors"):
        load_tensors(layout, path, CPU)


def test_outputs_are_not_mapped_into_the_judge(tmp_path: Path) -> None:
    """Whoever truncates a mapped file kills its reader with SIGBUS."""
    path = tmp_path / "outputs"
    layout = save_tensors([torch.ones(1 << 20)], path)
    (tensor,) = load_tensors(layout, path, CPU)
    os.truncate(path, 0)
    assert tensor is not None
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert tensor.sum() == 1 << 20
