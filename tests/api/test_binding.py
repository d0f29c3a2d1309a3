"""The last gate: what the whole call measures in the user's process decides, and the cache
remembers it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entries import entry_for, same
from torch_cudal1.api import binding, contenders, end_to_end, module_trial
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import DIFFERS_FROM_EAGER, Candidate
from torch_cudal1.judge.benchmark.statistics import PairedSummary
from torch_cudal1.search.tune import Choice
from torch_cudal1.store.context import TuneContext, make_context

CPU = torch.device("cpu")
NET, X = torch.nn.Linear(4, 4), torch.randn(2, 4)


def summary(low: float, speedup: float, high: float, *, steady: bool = True) -> PairedSummary:
    return PairedSummary(
        speedup, low, high, speedup, 1.0, 56, steady, (speedup,) * 7, (speedup,) * 7
    )


class Trial:
    """Stands in for the measurement: each contender is a word, its result is looked up."""

    def __init__(self, results: dict[str, tuple[float, float, float]]) -> None:
        self.results = results

    def arguments(self, device: torch.device) -> Any:
        from contextlib import nullcontext

        return nullcontext(((X,), {}))

    def time_against_forward(
        self, call: Any, args: Any, kwargs: Any, place: TuneContext
    ) -> PairedSummary:
        return summary(*self.results[call])

    def time_against_each_other(
        self, a: Any, b: Any, args: Any, kwargs: Any, place: TuneContext
    ) -> PairedSummary:
        return summary(*self.results[f"{b} over {a}"])


def choices(place: TuneContext, origin: str, schedule: Any = "inductor") -> tuple[Choice, ...]:
    with torch.no_grad():
        (region,) = capture_regions(NET, (X,))
    candidate = Candidate(
        same(region.program), schedule, origin, ("planted",) if origin != "baseline" else ()
    )
    return (Choice(region, candidate, entry_for(region, candidate, place.settings), "test"),)


@pytest.fixture
def place(tmp_path: Path) -> TuneContext:
    return make_context(CPU, Settings(cache_dir=tmp_path))


NOISY_GAIN, CLEAR_GAIN, LOSS = (0.97, 1.10, 1.20), (1.05, 1.08, 1.12), (0.90, 0.95, 0.99)
OVER = "cudal1 over torch.compile"
CASES = [  # origin of the choice, results by contender, winner
    ("rewrites", {"cudal1": CLEAR_GAIN}, "cudal1"),
    ("rewrites", {"cudal1": NOISY_GAIN}, "eager"),  # a swap must win beyond its noise
    (
        "baseline",
        {"cudal1": NOISY_GAIN},
        "cudal1",
    ),  # between the user's own baselines the better centre runs
    ("baseline", {"cudal1": LOSS}, "eager"),
    ("rewrites", {"torch.compile": CLEAR_GAIN, "cudal1": NOISY_GAIN}, "torch.compile"),
    (
        "rewrites",
        {"torch.compile": CLEAR_GAIN, "cudal1": (1.10, 1.20, 1.30), OVER: CLEAR_GAIN},
        "cudal1",
    ),
    (
        "baseline",
        {
            "torch.compile": (1.73, 1.79, 1.83),
            "cudal1": (1.33, 1.73, 1.98),
            OVER: (1.02, 1.05, 1.06),
        },
        "cudal1",
    ),
    (
        "baseline",
        {"torch.compile": CLEAR_GAIN, "cudal1": (1.10, 1.20, 1.30), OVER: LOSS},
        "torch.compile",
    ),
]


@pytest.mark.parametrize(("origin", "results", "winner"), CASES)
def test_the_gate_lets_through_what_wins(
    origin: str, results: dict[str, tuple[float, float, float]], winner: str, place: TuneContext
) -> None:
    chosen = choices(place, origin)
    calls = {name: name for name in results if name != OVER}
    settled = module_trial.run_trial(Trial(results), calls, chosen, place)  # type: ignore[arg-type]
    assert settled.winner == winner
    assert ("x [" in settled.note and "of torch.compile" in settled.note) is (OVER in results)
    assert settled.note.startswith("undone: ") is (winner == "eager")
    again = module_trial.find_remembered_decision(calls, chosen, place)
    assert again is not None
    assert (again.winner, again.note, again.call) == (settled.winner, settled.note, None)


DISTURBED, ONE_SIDED = (0.85, 0.94, 1.31), (1.33, 1.73, 1.98)
# what is measured one time after the other, whether steady; how many of them are made, the last one
# counting
MEASURED = [
    ([(DISTURBED, False), (CLEAR_GAIN, True)], 2),
    ([(DISTURBED, True)], 1),  # a small difference, well measured
    ([(ONE_SIDED, False)], 1),
    ([(DISTURBED, False)] * 3 + [(CLEAR_GAIN, True)], 3),
]


@pytest.mark.parametrize(("results", "made"), MEASURED)
def test_a_disturbed_measurement_is_made_again(
    results: list[tuple[tuple[float, float, float], bool]],
    made: int,
    place: TuneContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = [summary(*numbers, steady=steady) for numbers, steady in results]
    monkeypatch.setattr(end_to_end, "sample_pairs", lambda *_, **__: [])
    monkeypatch.setattr(end_to_end, "summarise", lambda _: waiting.pop(0))
    found = end_to_end.end_to_end_benchmark(lambda: None, lambda: None, place.device, margin=1.0)
    assert (found.low, found.speedup, found.high) == results[made - 1][0]
    assert len(waiting) == len(results) - made


def test_a_decision_about_other_candidates_is_not_taken_over(place: TuneContext) -> None:
    module_trial.run_trial(
        Trial({"cudal1": CLEAR_GAIN}), {"cudal1": "cudal1"}, choices(place, "rewrites"), place
    )  # type: ignore[arg-type]
    assert (
        module_trial.find_remembered_decision(
            {"cudal1": "cudal1"}, choices(place, "rewrites", "eager"), place
        )
        is None
    )


RACED = {"eager": 100.0, "inductor": 80.0}
# origin, schedule, times of the race, why Inductor had none, whether torch.compile must be measured
# beside the choice
BESIDE = [
    ("baseline", "inductor", RACED, "", False),  # what runs is Inductor's
    ("baseline", "eager", RACED, "", False),
    ("rewrites", "eager", RACED, "", False),  # judged against the fastest of them
    ("baseline", "inductor+graph", {**RACED, "inductor+graph": 60.0}, "", True),
    (
        "baseline",
        "eager+graph",
        {"eager": 100.0, "eager+graph": 90.0},
        "RuntimeError: no worker",
        True,
    ),
    ("baseline", "eager", {"eager": 100.0}, "RuntimeError: no worker", True),
    ("rewrites", "eager", {"eager": 100.0}, "RuntimeError: no worker", True),
    (
        "baseline",
        "eager",
        {"eager": 100.0},
        DIFFERS_FROM_EAGER,
        False,
    ),  # a result that is not eager's is nobody's rival
    (
        "baseline",
        "eager+graph",
        {"eager": 100.0, "eager+graph": 90.0},
        "",
        False,
    ),  # the user wants nothing compiled
]


@pytest.mark.parametrize(("origin", "schedule", "raced", "failed", "beside"), BESIDE)
def test_torch_compile_is_measured_where_the_race_has_not_settled_it(
    origin: str,
    schedule: str,
    raced: dict[str, float],
    failed: str,
    beside: bool,
    place: TuneContext,
) -> None:
    (choice,) = choices(place, origin, schedule)
    assert choice.entry is not None
    evidence = {
        **choice.entry.evidence,
        "baselines_us": raced,
        "baseline_failures": {"inductor": failed} if failed else {},
    }
    found = replace(choice, entry=replace(choice.entry, evidence=evidence))
    assert contenders._may_lose_to_torch_compile(found) is beside
    built = contenders.build_contenders(NET, None, (found,), lambda: None, frozenset())  # type: ignore[arg-type, return-value]
    assert ("torch.compile" in built) is beside
    assert ("cudal1" in built) is (origin != "baseline" or schedule != "eager")


class Failing(Trial):
    """A contender of this name fails when it is called."""

    def __init__(self, failing: str, results: dict[str, tuple[float, float, float]]) -> None:
        super().__init__(results)
        self.failing = failing

    def time_against_forward(
        self, call: Any, args: Any, kwargs: Any, place: TuneContext
    ) -> PairedSummary:
        if call == self.failing:
            raise RuntimeError("no compiler here\nmore")
        return super().time_against_forward(call, args, kwargs, place)


def test_torch_compile_that_fails_is_out_and_told_and_ours_that_fails_is_heard(
    place: TuneContext,
) -> None:
    both = {"torch.compile": "torch.compile", "cudal1": "cudal1"}
    chosen = choices(place, "baseline", "eager+graph")
    settled = module_trial.run_trial(
        Failing("torch.compile", {"cudal1": CLEAR_GAIN}), both, chosen, place
    )  # type: ignore[arg-type]
    assert settled.winner == "cudal1"
    assert "torch.compile failed (RuntimeError: no compiler here)" in settled.note
    with pytest.raises(RuntimeError, match="no compiler"):
        module_trial.run_trial(Failing("cudal1", {"torch.compile": LOSS}), both, chosen, place)  # type: ignore[arg-type]


def test_where_inductor_had_no_race_the_whole_call_decides_and_only_in_a_search(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """eager was the fastest of what ran, and torch.compile, which could not run in the judge, is
    faster here.
    """
    asked: list[str] = []

    def end_to_end(trial: Any, contenders: Any, *_: Any) -> Any:
        asked.extend(contenders)
        return module_trial.EndToEndDecision("torch.compile", "measured", lambda args, kwargs: X)

    (choice,) = choices(place, "baseline", "eager")
    assert choice.entry is not None
    evidence = {
        **choice.entry.evidence,
        "timing": None,
        "baselines_us": {"eager": 1.0},
        "baseline_failures": {"inductor": "no"},
    }
    found = replace(choice, entry=replace(choice.entry, evidence=evidence))
    monkeypatch.setattr(binding, "run_trial", end_to_end)
    monkeypatch.setattr(binding, "choose", lambda *_, **__: found)
    with torch.no_grad():
        served = binding.bind(NET, (X,), {}, place.settings)
        assert (type(served), asked) == (binding.Unbound, [])
        served = binding.bind(NET, (X,), {}, place.settings.but(on_miss="tune"))
        assert (type(served), asked) == (binding.Bound, ["torch.compile"])
