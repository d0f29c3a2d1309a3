"""Every attack of foreign code on the world outside fails, and honest work goes on."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator

import pytest
import torch

from tests.judge.sandbox.foreign_children import HONEST, load_source, start_foreign_child
from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, Limits
from torch_cudal1.judge.sandbox.confine import landlock, seccomp
from torch_cudal1.judge.wire.channel import load_tensors, save_tensors

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not landlock.find_version() or not seccomp.is_supported(),
    reason="foreign code is refused here: level 1 only",
)

# what the kernel answers
STOPPED = r"(OSError|PermissionError|FileNotFoundError|ProcessLookupError|ValueError): "

# what the source does when it is imported; its targets are filled in
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


@pytest.fixture(scope="module")
def attack_targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    outside = tmp_path_factory.mktemp("outside")
    for folder in (outside, *outside.parents):
        if folder.name.startswith("pytest"):
            folder.chmod(0o755)
    outside.chmod(0o777)
    tripwire = outside / "canary"
    tripwire.write_text("a secret")
    tripwire.chmod(0o666)
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        path = f"{outside}/s" if len(str(outside)) < 100 else "/tmp/s"
        unix.bind(path)
        os.chmod(path, 0o777)
        tcp.listen()
        unix.listen()
        port = tcp.getsockname()[1]
        yield {
            "canary": str(tripwire),
            "outside": str(outside),
            "port": port,
            "socket": path,
            "judge": os.getpid(),
        }
    assert tripwire.read_text() == "a secret"
    assert sorted(os.listdir(outside)) == ["canary", "s"]


@pytest.fixture(scope="module", params=[2, 3], ids=["level 2", "level 3"])
def child(request: pytest.FixtureRequest) -> Iterator[Child]:
    limits = Limits(CPU, 30.0, trust="foreign", phase="run")
    probed = probe.probe_level(limits, request.param)
    if probed.level < request.param:
        pytest.skip(f"not to be had here: {probed.why}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "find_levels", lambda _: (probed,))
        with start_foreign_child() as running:
            yield running


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attack_on_the_world_outside_fails(
    child: Child, attack_targets: dict[str, object], name: str
) -> None:
    """The attacks share a child: one that harms it shows in the next."""
    attack = ATTACKS[name].format(**attack_targets)
    with pytest.raises(CandidateFailure, match=STOPPED):
        load_source(child, f"{PREFACE}\n{attack}\nraise RuntimeError('the attack came through')")
    assert child.usable


def test_honest_work_is_not_disturbed(child: Child) -> None:
    load_source(child, HONEST)
    assert child.confinement.level >= 2
    assert child.confinement.uid != 0


def test_tensors_travel_both_ways(child: Child) -> None:
    """The child is another user where root starts it; both must be able to write what the other
    reads.
    """
    load_source(
        child,
        "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x): return x + 1",
    )
    inputs_path, outputs_path = child.reserve_file(), child.reserve_file()
    value = torch.arange(6.0).reshape(2, 3)
    child.call(
        "put", name="set", layout=save_tensors([value], inputs_path), path=str(inputs_path), base=""
    )
    answer = child.call("run", slot="candidate", inputs="set", path=str(outputs_path), hold=False)
    (result,) = load_tensors(answer["layout"], outputs_path, CPU)
    assert result is not None
    assert torch.equal(result, value + 1)
    child.call("drop", names=["set"])
    assert not inputs_path.exists()


def test_a_build_leaves_no_process_behind() -> None:
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
    with start_foreign_child(phase="build") as child:
        with pytest.raises(CandidateFailure, match="left one"):
            load_source(child, text)
        lock = os.open(child.scratch / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: a process still holds it
    os.close(lock)


def test_a_build_may_compile_with_gcc_and_load_the_result() -> None:
    text = """
    import ctypes, subprocess
    open('two.c', 'w').write('int two(void) { return 2; }')
    subprocess.run(['gcc', '-shared', '-fPIC', 'two.c', '-o', 'two.so'], check=True)
    assert ctypes.CDLL('./two.so').two() == 2
    raise RuntimeError('compiled')
    """
    with (
        start_foreign_child(phase="build") as child,
        pytest.raises(CandidateFailure, match="compiled"),
    ):
        load_source(child, text)
