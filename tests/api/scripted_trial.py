"""Test helper: a measurement of whole calls whose results are looked up, and choices to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.entries import entry_for, same
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import Candidate
from torch_cudal1.judge.benchmark.statistics import PairedSummary
from torch_cudal1.search.tune import Choice
from torch_cudal1.store.context import TuneContext, make_context

CPU = torch.device("cpu")


NET, X = torch.nn.Linear(4, 4), torch.randn(2, 4)


def make_summary(low: float, speedup: float, high: float, *, steady: bool = True) -> PairedSummary:
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
        return make_summary(*self.results[call])

    def time_against_each_other(
        self, a: Any, b: Any, args: Any, kwargs: Any, place: TuneContext
    ) -> PairedSummary:
        return make_summary(*self.results[f"{b} over {a}"])


def make_choices(place: TuneContext, origin: str, schedule: Any = "inductor") -> tuple[Choice, ...]:
    with torch.no_grad():
        (region,) = capture_regions(NET, (X,))
    candidate = Candidate(
        same(region.program), schedule, origin, ("planted",) if origin != "baseline" else ()
    )
    return (Choice(region, candidate, entry_for(region, candidate, place.settings), "test"),)


def make_place(cache_dir: Path) -> TuneContext:
    return make_context(CPU, Settings(cache_dir=cache_dir))


NOISY_GAIN, CLEAR_GAIN, LOSS = (0.97, 1.10, 1.20), (1.05, 1.08, 1.12), (0.90, 0.95, 0.99)


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
