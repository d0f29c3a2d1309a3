"""`cudal1 generate` as a user calls it: a scripted server on this machine, the judge's own
processes, and a cache of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import loopback as acts
from tests.training.loopback import Loopback, loopback, status
from tests.training.scripted import ScriptedBenchmark
from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands import generate
from torch_cudal1.cli.commands.generate import tasks_of
from torch_cudal1.core.errors import TargetError
from torch_cudal1.ingest.formats.task import PublishedTask
from torch_cudal1.ingest.published.adopt import AdoptionOutcome
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult, check_stability
from torch_cudal1.judge.benchmark.cross_process import ChildBatchTimer
from torch_cudal1.judge.benchmark.protocol import Measurement
from torch_cudal1.judge.benchmark.quick import PreparedBenchmark
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan
from torch_cudal1.judge.pool import judge_evaluator
from torch_cudal1.judge.pool.slot import Slot
from torch_cudal1.judge.reference.trial import Trial

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sort(x, dim=1).values.amax(1)
def get_inputs(): return [torch.randn(32, 64)]
def get_init_inputs(): return []
"""
PROGRAM = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return {result}
"""


def answer(result: str) -> str:
    return f"## Analysis\n\nSorting is not needed.\n\n## Code\n\n```python{PROGRAM.format(result=result)}```\n"


def make_benchmark(trial: Trial, baseline: ChildBatchTimer, plan: TimingPlan) -> PreparedBenchmark:
    """A clock on which every right program is 1.5 times as fast: how quiet this machine is, is not
    the test's business.
    """
    measurement = Measurement(plan, {"hot": summarise([(150.0, 100.0)] * 42)}, (1.0, 1.0), 1, 0.1)
    return ScriptedBenchmark(
        lambda: BenchmarkResult(measurement, tuple(check_stability(measurement)), {})
    )


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_evaluator, "Slot", lambda terms: Slot(terms, make_benchmark))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "rowmax.py"
    path.write_text(REFERENCE)
    return path


class Shelf:
    """An `Adoption` that takes the first it is offered, or none."""

    offered: list[PublishedTask]
    takes: bool

    def __init__(self, *arguments: Any) -> None:
        pass

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def adopt(self, task: PublishedTask) -> AdoptionOutcome:
        type(self).offered.append(task)
        return (
            AdoptionOutcome("accepted", stored=True, low=1.4)
            if self.takes
            else AdoptionOutcome("not_faster", "it is not", low=1.0)
        )


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> type[Shelf]:
    shelf_class = type("OneShelf", (Shelf,), {"offered": [], "takes": True})
    monkeypatch.setattr(generate, "Adoption", shelf_class)
    return shelf_class


def run_generate(server: Loopback, target: Path, *more: str) -> int:
    folder = target.parent
    arguments = [
        "--llm",
        server.url,
        "--device",
        "cpu",
        "--cache-dir",
        str(folder / "cache"),
        "--out",
        str(folder / "run"),
        "--quiet",
    ]
    return main(["generate", str(target), *arguments, *more])


@pytest.mark.usefixtures("_clock")
def test_right_programs_are_judged_and_the_best_is_handed_to_the_plugin(
    target: Path, shelf: type[Shelf], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = iter([answer("x.amax(1)"), answer("x.amin(1)"), "no idea", answer("x.max(1).values")])
    with loopback(
        status(429, headers={"Retry-After": "0"}), acts.junk, answer=lambda prompt: next(texts)
    ) as server:
        code = run_generate(server, target, "--rounds", "2", "--samples", "2", "--json")
        (row,) = json.loads(capsys.readouterr().out)
        assert code == 0
        assert row["outcomes"] == {"ok": 2, "wrong": 1, "undecodable": 1}
        assert row["stored"]
        assert [offer.candidate for offer in shelf.offered] == [row["best"]["program"]]
        assert "sort" not in row["best"]["program"]
        assert shelf.offered[0].reference == REFERENCE
        requests_before = len(server.seen)
        assert (
            run_generate(server, target, "--rounds", "2", "--samples", "2") == 0
        )  # it is done: nobody is asked again
        assert len(server.seen) == requests_before


@pytest.mark.usefixtures("_clock")
def test_where_nothing_wins_the_code_is_4_and_all_of_the_best_were_tried(
    target: Path, shelf: type[Shelf]
) -> None:
    shelf.takes = False
    texts = iter([answer("x.amax(1)"), answer("x.max(1).values")])
    with loopback(answer=lambda prompt: next(texts)) as server:
        assert run_generate(server, target, "--rounds", "1", "--samples", "2") == 4
    assert len(shelf.offered) == 2


def test_a_server_that_is_down_is_1_and_told(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with loopback(status(401, body=b"no such key")) as server:
        assert run_generate(server, target, "--rounds", "1", "--samples", "1") == 1
    assert "no such key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--money", "3"], "--price-prompt"),
        (["--llm", "no-such-folder"], "the URL of a server, or a folder"),
        (["--llm", "https://example.com/v1", "--offline"], "'offline' is set"),
    ],
)
def test_what_cannot_be_asked_is_2_and_says_what_to_give(
    target: Path, more: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with loopback() as server:
        assert run_generate(server, target, *more) == 2
    assert reason in capsys.readouterr().err


def test_targets_are_files_folders_and_releases_and_are_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in ("10_b", "9_a"):
        (folder / f"{name}.py").write_text(REFERENCE + "\nraise SystemExit('it was run')\n")
    assert [Path(task.id).name for task in tasks_of(str(folder))] == ["9_a", "10_b"]
    release = tmp_path / "release.json"
    line = {"level_id": 1, "task_id": 7, "ref_code": REFERENCE, "custom_code": None}
    release.write_text(json.dumps(line) + "\nnot a line\n")
    (task,) = tasks_of(str(release))
    assert (task.id, task.reference) == ("level 1 task 7", REFERENCE)
    release.write_text("not a line\n")
    for bad in (str(release), "torch.nn:Linear", str(tmp_path / "missing.py")):
        with pytest.raises(TargetError):
            list(tasks_of(bad))
    (folder / "10_b.py").write_text("def get_inputs(): ...")
    with pytest.raises(TargetError, match="defines no Model, no get_init_inputs"):
        list(tasks_of(str(folder / "10_b.py")))


@pytest.mark.parametrize("through", ["folder", "server"])
def test_a_real_model_with_random_weights_writes_nothing_of_use_and_all_of_it_is_on_record(
    target: Path, through: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from torch_cudal1.ingest.llm.policy import LanguageModel, TinySpec, create_tiny

    words = ("import", "torch", "class", "def", "return", "Code", "```python", "```")
    folder = create_tiny(
        target.parent / "model", words, TinySpec(hidden=32, layers=1, heads=2, context=1024)
    )
    model = LanguageModel.load(folder, max_new_tokens=8)
    prompts: list[str] = []

    def complete(prompt: str) -> str:
        prompts.append(prompt)
        return model.sample([prompt], count=1, temperature=1.0, seed=len(prompts))[0][0]

    sizes = ["--rounds", "2", "--samples", "2", "--max-tokens", "8", "--json"]
    with loopback(answer=complete) as server:
        more = ["--llm", str(folder)] if through == "folder" else []
        assert run_generate(server, target, *sizes, *more) == 4
    (row,) = json.loads(capsys.readouterr().out)
    assert row["outcomes"] == {"undecodable": 4}
    assert row["spent"]["tokens"] > 400
    assert len(prompts) == (0 if through == "folder" else 4)
    written = [
        json.loads(line)
        for line in (target.parent / "run")
        .glob("*/completions.jsonl")
        .__next__()
        .read_text()
        .splitlines()
    ]
    assert sum("completion" in line for line in written) == 4
