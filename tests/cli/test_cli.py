"""The command line end to end: real targets, real caches, real processes. One search is real, the
rest lives on its cache.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_cudal1.__main__ import main
from torch_cudal1.ir.records import Candidate, Entry, Region
from torch_cudal1.search import tune as tune_module
from torch_cudal1.store.cache import files
from torch_cudal1.store.context import TuneContext

ROOT = Path(__file__).resolve().parents[2]
TARGETS = """\
import torch
from torch import nn

class RowScale(nn.Module):
    def forward(self, a, b):
        return torch.diag(a) @ b

class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)

class Opaque:
    pass

def make(): return RowScale().eval(), (torch.randn(512), torch.randn(512, 512))
def small(): return nn.Linear(8, 8).eval(), (torch.ones(2, 8),)
def raises(): raise ValueError("no such checkpoint")
def fails_when_called(): return nn.Linear(8, 8), (torch.ones(2, 9),)
def opaque_output(): return Calls(lambda x: (x + 1, Opaque())), (torch.ones(3),)
def reads_values(): return Calls(lambda x: x + 1 if x.sum() > 0 else x - 1), (torch.ones(3),)
def unknown_size(): return Calls(torch.nonzero), (torch.ones(3),)
def sparse(): return Calls(lambda x: x * 2), (torch.eye(3).to_sparse(),)
def quantised(): return Calls(lambda x: x.dequantize()), (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),)
def empty(): return nn.Linear(8, 8).eval(), (torch.ones(0, 8),)
def no_pair(): return nn.Linear(8, 8)
"""


@dataclass(frozen=True)
class CommandResult:
    """How a process ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def environment() -> dict[str, str]:
    """Without a C++ compiler: Inductor then fails at once, searches take seconds, and
    eager is the only baseline.
    """
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCH_CUDAL1_")
    }
    return variables | {"PYTHONPATH": str(ROOT), "CXX": "/no/compiler", "COLUMNS": "400"}


def start(*command: object) -> subprocess.Popen[str]:
    """Start `python ...` as a shell would: an interrupt reaches it, also where the tests themselves run
    in the background of a script, whose processes ignore interrupts.
    """
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end(process: subprocess.Popen[str]) -> CommandResult:
    out, err = process.communicate(timeout=200)
    return CommandResult(process.returncode, out, err)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "model.py"
    path.write_text(TARGETS)
    return path


@dataclass(frozen=True)
class Warm:
    """A cache that two processes warmed for the same target at the same time."""

    folder: Path
    outcomes: tuple[CommandResult, CommandResult]


@pytest.fixture(scope="module")
def warm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Warm:
    folder = tmp_path_factory.mktemp("cache")
    line = (
        "-m",
        "torch_cudal1",
        "warmup",
        f"{model}:make",
        "--cache-dir",
        folder,
        "--budget",
        60,
        "--device",
        "cpu",
        "--json",
    )
    first, second = start(*line), start(*line)
    return Warm(folder, (end(first), end(second)))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> CommandResult:
    code = main([str(part) for part in arguments])
    shown = capsys.readouterr()
    return CommandResult(code, shown.out, shown.err)


def test_two_processes_that_warm_one_cache_search_once(warm: Warm) -> None:
    assert [outcome.code for outcome in warm.outcomes] == [0, 0], warm.outcomes
    results = [outcome.document["results"][0] for outcome in warm.outcomes]
    assert sorted(result["built"] > 0 for result in results) == [False, True]
    assert sorted(result["reused"] > 0 for result in results) == [False, True]
    assert not any(result["error"] for result in results)


WARM_PROCESS = """
import json, sys
children = []
sys.addaudithook(lambda event, args: children.append(event) if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") else None)
sys.path.insert(0, sys.argv[1])
import torch, cudal1
from model import make
torch.manual_seed(0)
module, inputs = make()
with torch.no_grad():
    expected = module(*inputs)
    module = cudal1.accelerate(module, inputs, on_miss="error", cache_dir=sys.argv[2], strictness="error")
    found = module(*inputs)
counters = cudal1.report().counters
(region,) = cudal1.explain(module).regions
print(json.dumps({"children": children, "counters": dict(counters), "runs": region.runs, "tried": len(region.tried),
                  "equal": torch.allclose(found, expected, rtol=1e-5)}))
"""


def test_a_process_on_a_warm_cache_searches_nothing_and_starts_no_process(
    warm: Warm, model: Path
) -> None:
    result = end(start("-c", WARM_PROCESS, model.parent, warm.folder))
    assert result.code == 0, result.err
    document = result.document
    counters = document["counters"]
    assert counters.get("candidates_built", 0) == counters.get("candidates_judged", 0) == 0
    assert counters["entries_reused"] == 1
    assert document["children"] == []
    assert document["equal"]
    assert document["tried"] > 0


def test_explain_tells_the_same_on_screen_as_json_and_as_page(
    warm: Warm,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    line = (
        "explain",
        f"{model}:make",
        "--cache-dir",
        warm.folder,
        "--device",
        "cpu",
        "--fail-on-miss",
        "--quiet",
    )
    document = run(capsys, *line, "--json", "--html", tmp_path / "page.html").document
    assert document["misses"] == 0
    (region,) = document["explanations"][0]["regions"]
    assert "diag_matmul -> eager" in [attempt["label"] for attempt in region["tried"]]
    shown = run(capsys, *line)
    assert shown.code == 0
    page = (tmp_path / "page.html").read_text()
    for part in (region["runs"].replace("->", "-"), region["reason"]):
        assert part.replace("-", "").split()[0] in " ".join(shown.out.split())
    assert region["key"][:16] in page
    assert "diag_matmul" in page


def test_the_entry_is_listed_shown_and_verified(
    warm: Warm, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry,) = run(capsys, "list", "--json", "--cache-dir", warm.folder).document["entries"]
    assert entry["region"] == "RowScale.inference"
    (shown,) = run(capsys, "show", entry["key"][:8], "--json", "--cache-dir", warm.folder).document
    assert shown["evidence"]["baselines_us"]["eager"] > 0
    assert {"inductor"} == set(shown["evidence"]["baseline_failures"])
    verified = run(capsys, "verify", "--json", "--cache-dir", warm.folder)
    assert (verified.code, verified.document["whole"], verified.document["broken"]) == (0, 1, [])


def test_plan_takes_what_is_stored_over_estimates(
    warm: Warm, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("plan", f"{model}:make", "--device", "cpu", "--json", "--cache-dir")
    (stored,) = run(capsys, *line, warm.folder).document["plans"]
    (guessed,) = run(capsys, *line, tmp_path).document["plans"]
    assert (stored["rows"][0]["cached"], guessed["rows"][0]["cached"]) == (True, False)
    assert guessed["rows"][0]["techniques"] == ["diag_matmul"]
    assert guessed["expected_end_to_end"] > 2


@pytest.fixture
def cache_copy(warm: Warm, tmp_path: Path) -> Path:
    """A copy of the warm cache, to be damaged."""
    for path in warm.folder.rglob("*"):
        if path.is_file() and path.suffix != ".lock":
            there = tmp_path / path.relative_to(warm.folder)
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(path.read_bytes())
    return tmp_path


def _truncate_files(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def _foreign(path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file({"weight": torch.ones(3)}, path)


def _of_another_region(path: Path) -> None:
    path.rename(path.with_name("0" * 64 + ".safetensors"))


@pytest.mark.parametrize(
    "damage", [_truncate_files, _foreign, _of_another_region], ids=lambda f: f.__name__
)
def test_a_damaged_or_foreign_file_is_a_miss_that_is_counted(
    damage: Any, cache_copy: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = cache_copy.rglob("*.safetensors")
    damage(path)
    explained = run(
        capsys,
        "explain",
        f"{model}:make",
        "--cache-dir",
        cache_copy,
        "--device",
        "cpu",
        "--fail-on-miss",
        "--json",
    )
    assert (explained.code, explained.document["misses"]) == (1, 1)
    assert "1 region had no stored decision" in explained.err
    assert run(capsys, "verify", "--cache-dir", cache_copy).code == 1
    assert run(capsys, "purge", "--broken", "--yes", "--cache-dir", cache_copy).code == 0
    assert not list(cache_copy.rglob("*.safetensors"))
    assert run(capsys, "verify", "--cache-dir", cache_copy).code == 0


def test_a_miss_without_the_option_is_no_failure(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(
        capsys, "explain", f"{model}:small", "--cache-dir", tmp_path, "--device", "cpu", "--json"
    )
    assert (result.code, result.document["misses"]) == (0, 1)
    assert (
        run(
            capsys,
            "explain",
            f"{model}:small",
            "--cache-dir",
            tmp_path,
            "--device",
            "cpu",
            "--fail-on-miss",
        ).code
        == 1
    )


def test_an_interrupt_ends_with_130_without_a_traceback_or_half_an_entry(
    model: Path, tmp_path: Path
) -> None:
    process = start(
        "-m",
        "torch_cudal1",
        "warmup",
        f"{model}:make",
        "--cache-dir",
        tmp_path,
        "--device",
        "cpu",
        "--budget",
        60,
    )
    deadline = time.monotonic() + 100
    while not list(tmp_path.rglob("*.search.lock")):  # the search has begun
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)  # into the start of a judge's child
    os.kill(process.pid, signal.SIGINT)
    result = end(process)
    # A shell reports 130 for both: Python ends itself by the signal where the interrupt came while
    # a library was running Python code of its own.
    assert result.code in (130, -signal.SIGINT), result
    assert "Traceback" not in result.err
    assert "interrupted" in result.err
    assert not [
        path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".json", ".tmp")
    ]
    assert main(["verify", "--cache-dir", str(tmp_path)]) == 0


# --- what follows decides at once: the search is a stand-in, everything around it is real


@pytest.fixture
def eager_search(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The search answers "eager" without measuring."""

    def tune(region: Region, place: TuneContext, **_: object) -> Entry:
        evidence = {
            "timing": None,
            "checks": [],
            "baselines_us": {"eager": 100.0, "inductor": 200.0},
        }
        choice = Candidate(region.program, "eager", "baseline")
        return Entry(
            region.key,
            region.name,
            place.target,
            place.contract,
            choice,
            evidence,
            (),
            "2026-01-01T00:00:00+00:00",
            "0",
        )

    monkeypatch.setattr(tune_module, "tune", tune)
    return


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "no callable 'nothing'; callables there: Calls, Opaque, RowScale, empty"),
        ("raises", "building it failed with ValueError: no such checkpoint"),
        ("no_pair", "a pair (module, inputs) is needed"),
        ("fails_when_called", "calling the module with its inputs failed with RuntimeError"),
    ],
)
@pytest.mark.parametrize("command", ["warmup", "explain"])
@pytest.mark.usefixtures("eager_search")
def test_a_target_that_is_no_target_is_2_and_the_next_is_done(
    command: str,
    name: str,
    reason: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    targets = (f"{model}:{name}", f"{model}:small")
    page = tmp_path / "page.html"
    result = run(
        capsys,
        command,
        *targets,
        "--cache-dir",
        tmp_path,
        "--device",
        "cpu",
        "--json",
        "--html",
        page,
    )
    assert result.code == 2
    assert reason in result.err
    assert f"{model}:{name}" in page.read_text()  # who has only the page sees that one is missing
    assert f"{model}:small" in page.read_text()
    assert "Traceback" not in result.err
    assert len(result.document["results" if command == "warmup" else "explanations"]) == 1


def test_a_file_that_is_not_there_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("warmup", "explain", "plan"):
        result = run(
            capsys, command, tmp_path / "none.py:make", "--cache-dir", tmp_path, "--device", "cpu"
        )
        assert result.code == 2
        assert "there is no file" in result.err
        assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown_size", ""),
        ("sparse", "not a plain tensor"),
        ("quantised", "not a plain tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.usefixtures("eager_search")
def test_what_cannot_be_served_runs_as_it_is_and_says_why(
    name: str, reason: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        capsys, "warmup", f"{model}:{name}", "--cache-dir", tmp_path, "--device", "cpu", "--json"
    )
    assert outcome.code == 0, outcome.err
    (result,) = outcome.document["results"]
    assert result["error"] is None
    assert result["explanation"]["regions"] == []
    (left_out,) = result["explanation"]["left_out"]
    assert reason in left_out
    assert len(left_out) > 20
    planned = run(
        capsys, "plan", f"{model}:{name}", "--cache-dir", tmp_path, "--device", "cpu", "--json"
    ).document["plans"][0]
    assert planned["rows"][0]["expected_speedup"] == 1.0


@pytest.mark.usefixtures("eager_search")
def test_a_forward_in_several_graphs_is_decided_by_calls_of_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(
        capsys,
        "warmup",
        f"{model}:reads_values",
        "--cache-dir",
        tmp_path,
        "--device",
        "cpu",
        "--json",
    )
    assert outcome.code == 0, outcome.err
    (result,) = outcome.document["results"]
    assert result["error"] is None
    notes = [*result["explanation"]["gate"], result["explanation"]["undone"]]
    assert "graphs with Python between" in " ".join(notes)


@pytest.mark.usefixtures("eager_search")
def test_inputs_of_size_zero_are_served(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(
        capsys, "warmup", f"{model}:empty", "--cache-dir", tmp_path, "--device", "cpu", "--json"
    )
    assert result.code == 0, result.err
    assert result.document["results"][0]["error"] is None


@pytest.mark.usefixtures("eager_search")
def test_a_cache_that_cannot_be_written_fails_the_warm_up_and_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    result = run(
        capsys,
        "warmup",
        f"{model}:small",
        "--cache-dir",
        tmp_path / "file" / "cache",
        "--device",
        "cpu",
        "--json",
    )
    assert result.code == 1
    assert "decided, but not stored: " in result.err
    assert "NotADirectoryError" in result.err
    assert result.document["results"][0]["explanation"]["regions"][0]["runs"] == "eager"


@pytest.mark.usefixtures("eager_search")
def test_a_full_disk_leaves_no_half_entry(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    result = run(
        capsys, "warmup", f"{model}:small", "--cache-dir", tmp_path, "--device", "cpu", "--json"
    )
    assert result.code == 1
    assert "No space left on device" in result.err
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".tmp")]
    monkeypatch.undo()
    assert run(capsys, "verify", "--cache-dir", tmp_path).code == 0


def test_doctor_looks_at_the_cache_it_is_given(
    warm: Warm, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(capsys, "doctor", "--cache-dir", warm.folder, "--json")
    assert result.code == 0
    (cache,) = [finding for finding in result.document["findings"] if finding["name"] == "cache"]
    assert "1 entry" in cache["what"]
