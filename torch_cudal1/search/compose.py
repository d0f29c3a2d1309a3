"""The built-in source: puts program variants and schedules together into candidates, the most
promising first.

It proposes; the judge decides. Schedules are tried in the order in which they won among the
baselines of the same region, because a rewrite rarely changes which of them suits a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Schedule

__all__ = ["SCHEDULES_PER_VARIANT", "compose"]

SCHEDULES_PER_VARIANT = (
    2  # a judgement costs seconds; a third one is worth it for the best of all only, see `search`
)


def compose(
    variants: Sequence[tuple[Program, tuple[str, ...]]],
    schedules: Sequence[Schedule],
    *,
    origin: str = "builtin",
) -> Iterator[Candidate]:
    """Candidates for each (program, techniques) under the best schedules, all variants under the
    best schedule first.
    """
    for schedule in schedules[:SCHEDULES_PER_VARIANT]:
        for program, techniques in variants:
            yield Candidate(program, schedule, origin, techniques)
