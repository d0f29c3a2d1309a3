"""The input and output values of an evaluator of whole programs: tasks, sources, measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["Decoded", "Failure", "Measured", "Outcome", "TrainingTask"]

Failure: TypeAlias = Literal["undecodable", "compile", "run", "wrong", "hack", "unstable"]
Outcome: TypeAlias = Literal["ok"] | Failure


@dataclass(frozen=True)
class TrainingTask:
    """One program to make faster.

    - reference: source of a KernelBench-style module (Model, get_inputs, get_init_inputs).
    - family: tasks are held out of training by family.
    - shape: the numbers that distinguish tasks of one family, () for a family of one task.
    - dtype: name of a torch dtype.
    """

    id: str
    reference: str
    family: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Decoded:
    """A completion that a codec could decode: the program in canonical form, the source of a module
    with `ModelNew`, and the analysis that came with it.
    """

    program: str
    source: str
    analysis: str = ""


@dataclass(frozen=True)
class Measured:
    """The measurement of one program of one task.

    - outcome: "ok", or a kind of failure.
    - score: speed-up (median of bucket means, rounded towards 1); None unless `outcome` is "ok".
    - detail: the failed check and its message, "" on success.
    - buckets: the bucket means of the score.
    """

    task: str
    program: str
    outcome: Outcome
    score: float | None = None
    detail: str = ""
    buckets: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        # A failure with a score, such as 1.0 or -1, would enter averages.
        if (self.outcome == "ok") != (self.score is not None):
            raise ValueError(
                f"expected a score exactly where the outcome is 'ok', got {self.outcome!r} with score {self.score!r}"
            )
        if self.score is not None and not 0 < self.score < float("inf"):
            raise ValueError(f"expected a finite speed-up above 0, got {self.score!r}")
