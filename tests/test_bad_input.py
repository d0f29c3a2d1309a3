"""What the machine and the user may do to the package: damaged or foreign entries, caches that cannot be
written, Ctrl-C in a search.

The answer is always the module's own, with the reason reported; the disk holds whole files or none; no
process is left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.entries import add_one_to_output, entry_for, plant
from tests.signing import allow, make_signer
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.program import Alloc, Aten, Launch, LaunchArg, Program, Step, TensorSpec, Value
from torch_cudal1.ir.records import Candidate
from torch_cudal1.store.cache.cache_paths import entry_path
from torch_cudal1.store.cache.entry_file import encode_entry
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.context import make_context

pytestmark = pytest.mark.usefixtures("inference")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 8)


def entry_file(cache: Path) -> Path:
    (path,) = cache.rglob("*.safetensors")
    return path


# --- entries on the disk

DAMAGE = {
    "empty": lambda entry_bytes: b"",
    "cut": lambda entry_bytes: entry_bytes[: len(entry_bytes) // 2],
    "one bit": lambda entry_bytes: (
        entry_bytes[:-3] + bytes([entry_bytes[-3] ^ 1]) + entry_bytes[-2:]
    ),
    "longer": lambda entry_bytes: entry_bytes + b"x",
    "text": lambda entry_bytes: b"not a kernel",
    "absurd header length": lambda entry_bytes: (2**63).to_bytes(8, "little") + entry_bytes[8:],
    "header of another kind": lambda entry_bytes: (2).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_a_miss_and_the_module_runs_as_it_is(damage, net, x, runs, tmp_path):
    plant(net, x, tmp_path, change=add_one_to_output)
    path = entry_file(tmp_path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    torch_cudal1.accelerate(net, x, cache_dir=tmp_path, strictness="error")
    assert torch.equal(net(x), net._call_impl(x))
    assert runs.total == 0
    assert telemetry.report().counters["resolve.miss"] == 1
    assert telemetry.report().counters.get("fallbacks", 0) == 0


def test_an_entry_that_is_a_folder_or_unreadable_is_a_miss(net, x, runs, tmp_path):
    plant(net, x, tmp_path, change=add_one_to_output)
    path = entry_file(tmp_path)
    path.unlink()
    path.mkdir()
    torch_cudal1.accelerate(net, x, cache_dir=tmp_path, strictness="error")
    assert torch.equal(net(x), net._call_impl(x))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"body": 3}', "null"])
def test_a_damaged_note_about_the_whole_call_is_measured_again(text, net, x, tmp_path):
    plant(net, x, tmp_path)
    for alias in tmp_path.rglob("*.json"):
        alias.write_text(text)
    torch_cudal1.accelerate(net, x, cache_dir=tmp_path, strictness="error")
    assert telemetry.report().counters["judge.end_to_end"] == 1
    assert torch.equal(net(x), net._call_impl(x))


def test_the_entry_of_another_machine_is_not_used(net, x, runs, tmp_path):
    (region,) = capture_regions(net, (x,))
    settings = Settings(cache_dir=tmp_path)
    place = make_context(torch.device("cpu"), settings)
    entry = entry_for(
        region,
        Candidate(add_one_to_output(region.program), "eager", "rewrites", ("planted",)),
        settings,
    )
    place.cache.put(replace(entry, target=replace(entry.target, torch="2.0.0", sku="another CPU")))
    torch_cudal1.accelerate(net, x, cache_dir=tmp_path, strictness="error")
    assert torch.equal(net(x), net._call_impl(x))
    assert runs.total == 0
    assert "not re-validated yet" in str(telemetry.report())


WRONG_PROGRAMS = {
    "an operator that does not exist": lambda program: replace(
        program,
        steps=(
            *program.steps,
            Aten("aten.no_such_op.default", (Value(0),), (), (program.value_count,)),
        ),
    ),
    "an operator that writes": lambda program: replace(
        program,
        steps=(*program.steps, Aten("aten.add_.Scalar", (Value(0), 1), (), (program.value_count,))),
    ),
    "too few arguments": lambda program: replace(
        program,
        steps=(*program.steps, Aten("aten.mm.default", (Value(0),), (), (program.value_count,))),
    ),
    "shapes that do not fit": lambda program: replace(
        program,
        steps=(
            *program.steps,
            Aten("aten.mm.default", (Value(0), Value(0)), (), (program.value_count,)),
        ),
    ),
    "a kernel of random bytes": lambda program: launching(program),
    "a kernel cut short": lambda program: launching(program, payload=b"\x7fELF\x02\x01\x01"),
}


def launching(
    program: Program,
    *,
    payload: bytes = b"random" * 100,
    grid: tuple[int, int, int] = (1, 1, 1),
    shared_bytes: int = 0,
    twice: bool = False,
) -> Program:
    """`program` with a launch behind it that cannot be."""
    first = program.value_count
    spec = TensorSpec("float32", (8, 8), (8, 1), program.device)
    steps: list[Step] = [
        Alloc(first, spec),
        Aten("aten.t.default", (Value(first),), (), (first + 1,)),
    ]
    pointers = tuple(
        LaunchArg("ptr", Value(value)) for value in ((first, first + 1) if twice else (first,))
    )
    steps.append(Launch("k", "no_such_kernel", grid, 128, shared_bytes, pointers))
    kernel = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return replace(
        program, steps=(*program.steps, *steps), payloads={**program.payloads, "k": kernel}
    )


@pytest.mark.parametrize("wrong", WRONG_PROGRAMS)
def test_a_whole_entry_with_a_program_that_cannot_run_ends_in_the_baseline(wrong, net, x, tmp_path):
    plant(net, x, tmp_path, change=WRONG_PROGRAMS[wrong])
    torch_cudal1.accelerate(net, x, cache_dir=tmp_path, strictness="silent")
    for _ in range(3):
        assert torch.equal(net(x), net._call_impl(x))
    report = telemetry.report()
    assert report.counters.get("fallbacks", 0) + report.counters.get("resolve.miss", 0) >= 1


BROKEN_LAUNCHES = {
    "a grid that overflows": ({"grid": (2**31, 1, 1)}, "grid"),
    "a negative grid": ({"grid": (-1, 1, 1)}, "grid"),
    "more shared memory than there is": ({"shared_bytes": 1 << 20}, "bytes of shared memory"),
    "buffers that overlap": ({"twice": True}, "are the same memory"),
}


@pytest.mark.parametrize("name", BROKEN_LAUNCHES)
def test_an_entry_whose_launch_breaks_a_rule_is_not_written_and_not_read_and_is_named(
    name, net, x, runs, tmp_path
):
    changes, words = BROKEN_LAUNCHES[name]
    (region,) = capture_regions(net, (x,))
    settings = Settings(cache_dir=tmp_path)
    entry = entry_for(
        region,
        Candidate(launching(region.program, **changes), "eager", "rewrites", ("planted",)),
        settings,
    )
    assert words in make_context(torch.device("cpu"), settings).cache.put(entry).reason
    path = entry_path(tmp_path, entry.region_key, entry.target, entry.contract)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_entry(entry))
    torch_cudal1.accelerate(net, x, cache_dir=tmp_path, strictness="silent")
    assert torch.equal(net(x), net._call_impl(x))
    assert runs.total == 0
    (message,) = [
        event.facts["reason"] for event in telemetry.report().events if event.what == "refused"
    ]
    assert words in message
    assert "no_such_kernel" in message


# --- caches that cannot be written


def test_a_read_only_cache_serves_and_is_not_written(net, x, runs, tmp_path):
    shared, user_cache = tmp_path / "shared", tmp_path / "own"
    plant(net, x, shared)
    signer = make_signer(tmp_path)
    LocalCache(shared).sign(signer)
    publishers = allow(tmp_path / "publishers.toml", team=signer.public)
    before = sorted(path for path in shared.rglob("*"))
    torch_cudal1.accelerate(
        net,
        x,
        cache_dir=user_cache,
        read_only_caches=(shared,),
        publishers=publishers,
        strictness="error",
    )
    assert torch.equal(net(x), net._call_impl(x))
    assert runs.total == 1
    assert sorted(path for path in shared.rglob("*")) == before


@pytest.mark.parametrize("on_miss", ["baseline", "tune"])
@pytest.mark.parametrize("kind", ["a file", "below a file", "a dangling link"])
def test_a_cache_folder_that_cannot_exist_costs_the_memory_of_the_search_only(
    kind, on_miss, x, tmp_path, monkeypatch
):
    net = nn.ReLU()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    folder = {"a file": "file", "below a file": "file/cache", "a dangling link": "link"}[kind]
    monkeypatch.setattr("torch_cudal1.search.tune.tune", instant_search)
    torch_cudal1.accelerate(
        net, x, cache_dir=tmp_path / folder, on_miss=on_miss, strictness="error"
    )
    assert torch.equal(net(x), net._call_impl(x))
    assert (tmp_path / "file").read_text() == "mine"


def instant_search(region, place, **_):
    """A search that finds the eager baseline at once."""
    entry = entry_for(region, Candidate(region.program, "eager", "baseline"), place.settings)
    return replace(entry, evidence={**entry.evidence, "timing": None})


def test_a_search_result_that_cannot_be_stored_is_reported(x, tmp_path, monkeypatch):
    monkeypatch.setattr("torch_cudal1.search.tune.tune", instant_search)
    (tmp_path / "file").write_text("mine")
    torch_cudal1.accelerate(
        nn.ReLU(), x, cache_dir=tmp_path / "file", on_miss="tune", strictness="error"
    )
    assert telemetry.report().counters["resolve.not_stored"] == 1


# --- Ctrl-C

SEARCH = """
import sys, torch, torch_cudal1
class Net(torch.nn.Module):
    def forward(self, a, b):
        return torch.diag(a) @ b
print("started", flush=True)
with torch.no_grad():
    torch_cudal1.accelerate(Net(), (torch.randn(512), torch.randn(512, 512)), on_miss="tune", cache_dir=sys.argv[1], budget_s=300)
print("done", flush=True)
"""


def sessions_below(pid: int) -> dict[int, Path]:
    """Children of a process that lead a session of their own, and their working folders, whichever
    thread started them.
    """
    folder_of_session = {}
    started = [
        child
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in _text(thread / "children").split()
    ]
    for child in started:
        try:
            if os.getsid(int(child)) == int(child):
                folder_of_session[int(child)] = Path(os.readlink(f"/proc/{child}/cwd"))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return folder_of_session


def _text(path: Path) -> str:
    """What a file of /proc says; nothing if its process or thread has ended."""
    try:
        return path.read_text()
    except (ProcessLookupError, FileNotFoundError):
        return ""


def alive_in(session: int) -> list[int]:
    """Living processes of a session."""
    members = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and os.getsid(int(entry.name)) == session
                and "\nState:\tZ" not in (entry / "status").read_text()
            ):
                members.append(int(entry.name))
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
    return members


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("after_s", [0.0, 2.0], ids=["as the judge starts", "in the middle"])
def test_ctrl_c_ends_a_search_at_once_and_leaves_nothing_behind(after_s, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    command = [sys.executable, "-c", SEARCH, str(tmp_path / "cache")]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline, children = time.monotonic() + 600, {}
        while not children and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
            children = sessions_below(process.pid)
        assert children, "the search never started a judge"
        time.sleep(after_s)
        children |= sessions_below(process.pid)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
        took_s = time.monotonic() - sent
    finally:
        process.kill()
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0
    assert "done" not in out
    assert took_s < 100  # of the 300 s that it was given, on a machine that may be busy
    assert [pid for session in children for pid in alive_in(session)] == []
    # A judge's process has a scratch folder of its own to work in.
    assert any(folder.name.startswith("tmp") for folder in children.values())
    assert [
        folder for folder in children.values() if folder.name.startswith("tmp") and folder.exists()
    ] == []
    remaining = [
        path.name
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    ]
    assert remaining == []
    assert LocalCache(tmp_path / "cache").verify() == ()
