"""Decisions of the quick tier that a busy machine left open: they hold for this process, and the next
ones measure again, up to `MAX_OPEN_DECISIONS` times.

The quick tier measures in the user's process, for a second, while that starts: often beside other
processes that start too. What such a machine says must not stay for good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.api.end_to_end import end_to_end_benchmark
from torch_cudal1.core.machine_load import find_other_share, sample_load
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.judge.benchmark.statistics import PairedSummary
from torch_cudal1.store.context import TuneContext

__all__ = ["MAX_OPEN_DECISIONS", "MEASURED_AGAIN", "OpenCount", "benchmark_quickly"]

# On a machine that is never idle each start would measure otherwise.
MAX_OPEN_DECISIONS = 3
MEASURED_AGAIN = "other processes kept the machine busy and the measurements disagree, so the next start measures again"
# Seconds of one benchmark. There are up to three, and the first answer waits for them.
BENCHMARK_S = 0.6
_FIELD = "open_decisions"


def benchmark_quickly(
    first: Callable[[], Any], second: Callable[[], Any], device: torch.device, needed: float
) -> tuple[PairedSummary, bool]:
    """The speed-up of `second` over `first`, and whether it stays open if that is `needed`: the
    buckets disagree about it while other processes used a quarter of the processors or more.
    """
    before = sample_load()
    summary = end_to_end_benchmark(
        first, second, device, margin=needed, budget_s=BENCHMARK_S, max_attempts=1
    )
    disagree = not summary.steady and summary.low < needed <= summary.high
    return summary, disagree and find_other_share(before, sample_load()) is not None


@dataclass(frozen=True)
class OpenCount:
    """How many processes in a row left the decision `name` (a hex digest) open."""

    name: str
    context: TuneContext
    processes: int

    @classmethod
    def read(cls, name: str, context: TuneContext) -> OpenCount:
        """What the cache knows of the decision; 0 where that is nothing."""
        record = context.cache.get_decision_record(name, context.target, context.contract)
        count = 0 if isinstance(record, Refusal) else record.get(_FIELD, 0)
        return cls(name, context, count if isinstance(count, int) else 0)

    @property
    def may_grow(self) -> bool:
        """Whether the next process shall measure again."""
        return self.context.settings.remeasure and self.processes < MAX_OPEN_DECISIONS

    def grow(self) -> None:
        """Remember that this process has left it open too. Such a record decides nothing."""
        record = {_FIELD: self.processes + 1, "candidates": []}
        context = self.context
        context.cache.put_decision_record(self.name, record, context.target, context.contract)
