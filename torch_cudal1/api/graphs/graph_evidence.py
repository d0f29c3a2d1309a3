"""What the evidence of cached entries says of the graphs of one torch.compile: which of their
choices together beat Inductor. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_cudal1.api.gradients.training_step import MIN_SPEEDUP_BEYOND_NOISE

if TYPE_CHECKING:
    from torch_cudal1.search.tune import Choice

__all__ = ["choose_by_evidence", "has_inductor_in_every_benchmark"]


def choose_by_evidence(choices: Sequence[Choice], margin: float) -> str:
    """ "swaps", "inductor" or "eager": by the measured time of all graphs together, forward and
    backward, against Inductor's.

    A trace costs host time, so swaps must be faster by the margin; leaving Inductor for plain eager
    needs more than noise.
    """
    # Sums, because forward and backward run one after the other in a step.
    chosen_us = sum(_time_us(choice) for choice in choices)
    inductor_us = sum(_read_baseline_us(choice, "inductor") for choice in choices)
    schedules = {str(choice.candidate.schedule) for choice in choices}
    if not any(_read_all_baselines_us(choice) for choice in choices):
        # No baseline was benchmarked. The user asked for torch.compile, so that runs.
        return "inductor"
    if any(choice.swapped for choice in choices) or schedules - {"eager", "inductor"}:
        return "swaps" if chosen_us * margin <= inductor_us else "inductor"
    eager_pays = chosen_us * MIN_SPEEDUP_BEYOND_NOISE <= inductor_us
    return "eager" if schedules == {"eager"} and eager_pays else "inductor"


def has_inductor_in_every_benchmark(choices: Sequence[Choice]) -> bool:
    """Whether Inductor ran in every baseline benchmark that there was."""
    return all(
        "inductor" in times for choice in choices if (times := _read_all_baselines_us(choice))
    )


def _time_us(choice: Choice) -> float:
    timing = _read_evidence(choice).get("timing") or {}
    return float(
        timing.get("candidate_us") or _read_baseline_us(choice, str(choice.candidate.schedule))
    )


def _read_baseline_us(choice: Choice, schedule: str) -> float:
    """Microseconds of a baseline; 0 for a graph without a benchmark, which Inductor keeps on either
    path.
    """
    times = _read_all_baselines_us(choice)
    return float(times.get(schedule, math.inf)) if times else 0.0


def _read_all_baselines_us(choice: Choice) -> dict[str, float]:
    times: dict[str, float] = _read_evidence(choice)["baselines_us"]
    return times


def _read_evidence(choice: Choice) -> Any:
    # `GraphRequest` decides nothing for a graph with a missing entry.
    assert choice.entry is not None
    return choice.entry.evidence
