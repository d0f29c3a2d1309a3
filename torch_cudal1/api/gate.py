"""The last gate's clock: what a whole call costs beside another, in the user's own process, and who
beats the module's forward.

It times and tells; which contenders there are, what runs then and what the cache remembers is
`binding`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_cudal1.api.trial_step import MORE_THAN_NOISE
from torch_cudal1.core import telemetry
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.device.gpu_lock import exclusive
from torch_cudal1.graph.module_call import Call
from torch_cudal1.graph.swap import FAILURES
from torch_cudal1.judge.benchmark.protocol import sample_pairs
from torch_cudal1.judge.benchmark.statistics import PairedSummary, summarise
from torch_cudal1.store.context import Place

__all__ = ["COMPILE", "in_words", "raced", "those_that_pay", "told"]

COMPILE = "torch.compile"
_BUDGET_S = 3.0
_MOST_TRIES = 3  # where the earlier ones were disturbed
_LEAST = 1.0  # the speed-up over the module's own forward that a contender needs


def raced(a: Callable[[], Any], b: Callable[[], Any], place: Place) -> PairedSummary:
    """Paired times of two steps. What their buckets disagree about and does not lie on one side of
    the gate is measured again.
    """
    with exclusive(place.device, "gate"):
        for _ in range(_MOST_TRIES):
            found = summarise(sample_pairs(a, b, place.device, budget_s=_BUDGET_S, margin=_LEAST))
            if found.steady or found.low >= _LEAST or found.high < _LEAST:
                break
    return found


def those_that_pay(
    contenders: Mapping[str, Call],
    against_own: Callable[[Call], PairedSummary],
    key: str,
    *,
    swapped: bool,
) -> tuple[list[str], list[str]]:
    """A word on each contender, and the names of those that beat the module's own forward."""
    notes: list[str] = []
    winners: list[str] = []
    for label, call in contenders.items():
        try:
            result = against_own(call)
        except (
            FAILURES
        ) as error:  # torch.compile is the user's, and need not work; of ours the caller must hear
            if label != COMPILE or is_sticky(error):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            telemetry.record("judge", "end_to_end", key, contender=label, failed=reason)
            notes.append(f"{label} failed ({reason})")
            continue
        telemetry.record("judge", "end_to_end", key, contender=label, **told(result))
        notes.append(f"{label} is {in_words(result)}")
        # A swap must win beyond its noise; between two of the user's own baselines the better
        # centre runs, if it is not level.
        if result.low >= _LEAST if swapped else result.speedup >= MORE_THAN_NOISE:
            winners.append(label)
    return notes, winners


def told(result: PairedSummary) -> dict[str, float]:
    """The facts of a measurement, for a record."""
    return {"speedup": result.speedup, "low": result.low, "high": result.high}


def in_words(result: PairedSummary) -> str:
    """The speed-up and its interval."""
    return f"{result.speedup:.2f}x [{result.low:.2f}, {result.high:.2f}]"
