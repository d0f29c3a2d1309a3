"""The whole way of a published task: an accepted one is used without a search, a cheat is refused
and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_cudal1
from tests.adversarial.fork_server import fork_children
from tests.entries import entry_for
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ingest.formats.task import PublishedTask
from torch_cudal1.ingest.published import adopt
from torch_cudal1.ingest.published.adopt import Adoption
from torch_cudal1.ir.records import Candidate, CheckResult, Entry, Region, Rejected, Timing, Verdict
from torch_cudal1.ir.schedule import Schedule
from torch_cudal1.judge.evaluate import baseline_benchmark, evaluator
from torch_cudal1.judge.evaluate.source_evaluator import (
    SourceEvaluation,
    SourceEvaluationConfig,
    SourceEvaluator,
)
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.search import baselines
from torch_cudal1.search.tune import Choice, make_end_to_end_name
from torch_cudal1.store.context import TuneContext, make_context

CPU = torch.device("cpu")
HEAD = "import torch\n"
MODULE = """
class {name}(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width))

    def forward(self, x):
        {body}
"""
INPUTS = """
def get_inputs(): return [torch.randn(256, 512)]
def get_init_inputs(): return [512]
"""
SLOW = "return torch.sort(x * self.weight, dim=1).values.amax(1)"
FAST = "return (x * self.weight).amax(1)"
REFERENCE = HEAD + MODULE.format(name="Model", body=SLOW) + INPUTS


def task(body: str = FAST) -> PublishedTask:
    return PublishedTask(
        "here:1",
        "level 1 task 7",
        REFERENCE,
        HEAD + MODULE.format(name="ModelNew", body=body),
        {"score": 9.0},
    )


class Believer:
    """A evaluator that finds every source right: what comes after it must stand alone."""

    def __init__(self, job: SourceEvaluationConfig, progress: Any = None) -> None:
        self.judged = 0

    def evaluate(self, reference: str, candidate: str, *, timed: bool) -> SourceEvaluation:
        assert not timed
        self.judged += 1
        verdict = Verdict((CheckResult("contract", True),))
        return SourceEvaluation(
            SourceCandidate(candidate), Rejected("not timed", "timing"), verdict
        )

    def close(self) -> None:
        pass


def won(trial: Any, ranking: Any, verdict: Verdict, job: Any) -> tuple[Verdict, Timing]:
    """The measurement of a Program that was found right."""
    return verdict, Timing(
        verdict,
        ranking.best.label,
        10.0,
        100.0,
        10.0,
        9.0,
        11.0,
        50,
        dict(ranking.medians_us),
        score=9.0,
    )


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    with fork_children():
        yield


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One baseline, and a clock on which every right Program wins: baselines and times are tested
    elsewhere.
    """
    monkeypatch.setattr(
        baselines, "list_baseline_schedules", lambda region, place: [Schedule.parse("eager")]
    )
    monkeypatch.setattr(baseline_benchmark, "_BUDGET_S", 0.5)
    monkeypatch.setattr(evaluator, "_measure", won)


@pytest.fixture
def place(tmp_path: Path) -> TuneContext:
    return make_context(CPU, Settings(cache_dir=tmp_path / "cache", candidate_timeout_s=30.0))


@pytest.fixture
def adoption(place: TuneContext, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adoption]:
    monkeypatch.setattr(adopt, "SourceEvaluator", Believer)
    with Adoption(
        place,
        SourceEvaluationConfig(
            place.settings, place.contract, CPU, gradients=False, trust="foreign"
        ),
    ) as adopter:
        yield adopter


def entries(place: TuneContext) -> list[Any]:
    return list(place.cache.iter_entries())


def store_end_to_end_decision(region: Region, entry: Entry, place: TuneContext) -> None:
    """Remember that the whole call is faster with it: `accelerate` asks its own clock otherwise."""
    choices = [Choice(region, entry.choice, entry, "")]
    note = {"winner": "cudal1", "note": "planted", "candidates": [entry.choice.digest]}
    place.cache.put_decision_record(
        make_end_to_end_name(choices), note, place.target, place.contract
    )


def test_an_accepted_kernel_is_used_by_accelerate_without_a_search(
    adoption: Adoption, place: TuneContext
) -> None:
    result = adoption.adopt(task())
    assert (result.outcome, result.stored) == ("accepted", True), result
    assert result.low == 9.0
    (entry,) = (located.entry for located in entries(place))
    assert entry.choice.origin == "published"
    assert entry.evidence["published"]["task"] == "level 1 task 7"
    space: dict[str, Any] = {}
    exec(REFERENCE, space)
    model, x = space["Model"](512).eval(), torch.randn(256, 512)
    with torch.no_grad():
        expected = model(x)
        store_end_to_end_decision(capture_regions(model, (x,))[0], entry, place)
        before = telemetry.report().counters
        torch_cudal1.accelerate(model, x, cache_dir=place.settings.cache_dir, strictness="error")
        torch.testing.assert_close(model(x), expected)
    (region,) = torch_cudal1.explain(model).regions
    after = telemetry.report().counters
    assert region.origin == "published"
    assert region.key == result.region_key
    for counter in ("regions_tuned", "candidates_judged"):
        assert after.get(counter, 0) == before.get(counter, 0)


def test_a_program_for_which_no_time_was_left_is_not_rejected(
    adoption: Adoption, place: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [{"label": "one -> eager", "decision": "not judged", "reason": "the budget was spent"}]

    def run_out_of_budget(
        region: Region, place: TuneContext, programs: Any, *, origin: str, **_: Any
    ) -> Entry:
        baseline = Candidate(region.program, "eager", "baseline")
        return replace(entry_for(region, baseline, place.settings), tried=tuple(late))

    monkeypatch.setattr(adopt, "tune_with", run_out_of_budget)
    result = adoption.adopt(task())
    assert (result.outcome, result.detector, result.stored) == ("not_judged", "budget", False)
    assert f"budget of {place.settings.budget_s:g} s" in result.reason
    assert "--budget" in result.reason
    assert entries(place) == []


def make_entry(
    low: float, region: Region, place: TuneContext, candidate: Candidate, **changes: Any
) -> Entry:
    """What a search would have made of a candidate."""
    entry = entry_for(region, candidate, place.settings)
    timing = {**entry.evidence["timing"], "speedup": low * 1.1, "low": low}
    return replace(entry, evidence={**entry.evidence, "timing": timing}, **changes)


def set_measured_low(monkeypatch: pytest.MonkeyPatch, low: float) -> None:
    """Every evaluated candidate has the lower bound `low`."""

    def stand_in(
        region: Region, place: TuneContext, programs: Any, *, origin: str, **_: Any
    ) -> Entry:
        ((program, techniques),) = programs
        return make_entry(low, region, place, Candidate(program, "eager", origin, techniques))

    monkeypatch.setattr(adopt, "tune_with", stand_in)


def test_a_stored_decision_goes_only_for_a_faster_one(
    adoption: Adoption, place: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    for low, stored in ((2.0, True), (1.5, False), (3.0, True)):
        set_measured_low(monkeypatch, low)
        result = adoption.adopt(task())
        assert (result.outcome, result.stored) == ("accepted", stored)
        assert (
            result.reason == "the same Program is stored already, at 2.00x; this one reached 1.50x"
        ) == (not stored)
    (entry,) = (located.entry for located in entries(place))
    assert entry.speedup == 3.0


def test_a_program_that_is_right_and_no_faster_is_not_stored(
    adoption: Adoption, place: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {
        "label": "x -> eager",
        "decision": "rejected",
        "reason": "0.98x",
        "detector": "timing",
        "speedup": 0.99,
        "low": 0.98,
    }

    def stand_in(region: Region, place: TuneContext, programs: Any, **_: Any) -> Entry:
        return make_entry(
            1.0, region, place, Candidate(region.program, "eager", "baseline"), tried=(slow,)
        )

    monkeypatch.setattr(adopt, "tune_with", stand_in)
    result = adoption.adopt(task())
    assert (result.outcome, result.reason, result.low, result.stored) == (
        "not_faster",
        "0.98x",
        0.98,
        False,
    )
    assert adoption.adopt(task(SLOW)).reason == "it is the reference's own graph"
    assert not entries(place)


LIES = {  # right when it is run, and not what it lets itself be traced as
    "another result": f"return x.amax(1) if type(x) is not torch.Tensor else {FAST[7:]}",
    "memory that was never written": "return torch.empty(x.shape[0])",
    "nothing of its inputs": "return torch.zeros(x.shape[0])",
}


@pytest.mark.parametrize("name", LIES)
def test_a_program_that_differs_from_its_validated_source_is_refused(
    name: str, adoption: Adoption, place: TuneContext
) -> None:
    result = adoption.adopt(task(LIES[name]))
    assert result.outcome == "rejected", result
    assert result.detector
    assert not entries(place)


def test_a_cheating_source_is_refused_before_it_is_lowered(place: TuneContext) -> None:
    job = SourceEvaluationConfig(
        place.settings, place.contract, CPU, gradients=False, trust="foreign"
    )
    with Adoption(place, job) as adoption:
        assert isinstance(adoption._evaluator, SourceEvaluator)
        result = adoption.adopt(
            task(
                "self.last = getattr(self, 'last', None)\nif self.last is None: self.last = x.amax(1)\nreturn self.last".replace(
                    "\n", "\n        "
                )
            )
        )
    assert (result.outcome, result.stored) == ("rejected", False)
    assert result.detector
    assert result.region_key == ""
    assert not entries(place)


def test_what_is_not_lowerable_says_why_and_stores_nothing(
    adoption: Adoption, place: TuneContext
) -> None:
    result = adoption.adopt(task(f"if x.sum() > 0: pass\n        {FAST}"))
    assert result.outcome == "not_lowerable"
    assert "values of tensors" in result.reason
    assert not entries(place)


def test_a_reference_that_cannot_be_used_is_not_the_candidates_fault(adoption: Adoption) -> None:
    broken = PublishedTask("here:1", "x", REFERENCE.replace("[512]", "[513]"), task().candidate)
    assert adoption.adopt(broken).outcome in ("reference_unusable", "not_lowerable")
    unreadable = PublishedTask("here:1", "x", "class Model(:", task().candidate)
    result = adoption.adopt(unreadable)
    assert result.outcome == "reference_unusable"
    assert "SyntaxError" in result.reason


def test_withdrawn_and_foreign_tasks_cost_nothing(adoption: Adoption) -> None:
    assert adoption.adopt(PublishedTask("here", "x", REFERENCE, None)).outcome == "withdrawn"
    result = adoption.adopt(
        PublishedTask("here", "x", REFERENCE, "", foreign="it is written in cuda")
    )
    assert (result.outcome, result.reason) == ("not_lowerable", "it is written in cuda")
    assert adoption._evaluator.judged == 0  # type: ignore[attr-defined]
