"""One measured program as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch_cudal1.judge.pool.measured import Measured, Outcome

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """A program of a task, measured once. `detail`: the failed check and its words. `source`: the
    source's sha256, first digits.

    `naive`: the speed-up that a trusting evaluator would report of a program that the judge
    refuses, None where even that saw a wrong result. It is not asked of a program that the judge
    finds right, or that did not run.
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
        """As a dictionary without what it lacks."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "", ())}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of `to_json`."""
        given = dict(data)
        given["buckets"] = tuple(given.get("buckets", ()))
        return cls(**given)

    def measured(self) -> Measured:
        """As the pipeline knows it."""
        return Measured(
            self.task, self.program, self.outcome, self.score, self.detail, self.buckets
        )
