"""One measured program as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch_cudal1.judge.pool.measured import Measured, Outcome

__all__ = ["LandscapeRow"]


@dataclass(frozen=True)
class LandscapeRow:
    """A program of a task, measured once. `detail`: the failed check and its message. `source`: the
    first digits of the source's sha256.

    `naive`: the speed-up that a naive evaluator reports for a program that the judge refuses. None
    where it sees a wrong result too, and for programs that the judge accepts or that did not run.
    """

    task: str
    program: str
    outcome: Outcome
    score: float | None = None
    buckets: tuple[float, ...] = ()
    detail: str = ""
    source: str = ""
    naive: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As a dictionary without empty values."""
        # Most rows of a landscape are failures without score, buckets and naive speed-up. A score
        # of 0.0 stays: it is none of the values that are left out.
        return {name: value for name, value in asdict(self).items() if value not in (None, "", ())}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LandscapeRow:
        """The inverse of `to_json`."""
        fields = dict(data)
        # JSON has no tuples, and a frozen row must be hashable.
        fields["buckets"] = tuple(fields.get("buckets", ()))
        return cls(**fields)

    def to_measured(self) -> Measured:
        """As an evaluator returns it."""
        return Measured(
            self.task, self.program, self.outcome, self.score, self.detail, self.buckets
        )
