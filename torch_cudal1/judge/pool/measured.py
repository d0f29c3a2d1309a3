"""What is asked of an evaluator of whole programs, and what it answers: tasks, sources,
measurements, as frozen values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Decoded", "Failure", "Measured", "Outcome", "TrainingTask"]

Failure: TypeAlias = Literal["undecodable", "compile", "run", "wrong", "hack", "unstable"]
Outcome: TypeAlias = Literal["ok"] | Failure


@dataclass(frozen=True)
class TrainingTask:
    """One thing to make faster.

    `reference`: source of a KernelBench-style module (Model, get_inputs, get_init_inputs).
    `family`: what held-out families are held out by. `shape`: the numbers that distinguish tasks of
    one family, () where there is one.
    """

    id: str
    reference: str
    family: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Decoded:
    """A completion that a codec understood: the program in canonical form, and the source of a
    module with `ModelNew`.
    """

    program: str
    source: str
    analysis: str = ""


@dataclass(frozen=True)
class Measured:
    """What became of one program of one task. Failures have no score: nobody can average one by
    mistake.

    `score`: the reward's speed-up (median of bucket means, rounded towards 1), only where `outcome`
    is "ok". `buckets`: the bucket means behind it. `detail`: the failed check and its words, "" on
    success.
    """

    task: str
    program: str
    outcome: Outcome
    score: float | None = None
    detail: str = ""
    buckets: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        if (self.outcome == "ok") != (self.score is not None):
            raise ValueError(
                f"expected a score exactly where the outcome is 'ok', got {self.outcome!r} with score {self.score!r}"
            )
        if self.score is not None and not 0 < self.score < float("inf"):
            raise ValueError(f"expected a finite speed-up above 0, got {self.score!r}")
