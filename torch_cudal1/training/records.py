"""The values that the parts of the pipeline hand to each other, and the four protocols that keep them apart.

A *program* is what a policy writes and a codec understands: KernelBench-style source (codec `text`) or a sentence of the
kernel-schedule language (codec `ksl`). Below the codec everything is source text and goes to the same judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

__all__ = ["Codec", "Decoded", "Evaluator", "Exemplar", "Failure", "Measured", "Outcome", "Policy", "TrainingTask", "Undecodable"]

Failure: TypeAlias = Literal["undecodable", "compile", "run", "wrong", "hack", "unstable"]
Outcome: TypeAlias = Literal["ok"] | Failure


@dataclass(frozen=True)
class TrainingTask:
    """One thing to make faster.

    `reference`: source of a KernelBench-style module (Model, get_inputs, get_init_inputs). `family`: what held-out families are
    held out by. `shape`: the numbers that distinguish tasks of one family, () where there is one.
    """

    id: str
    reference: str
    family: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Exemplar:
    """An earlier success shown in a prompt. `score`: its speed-up."""

    program: str
    score: float


@dataclass(frozen=True)
class Measured:
    """What became of one program of one task. Failures have no score: nobody can average one by mistake.

    `score`: the reward's speed-up (median of bucket means, rounded towards 1), only where `outcome` is "ok".
    `buckets`: the bucket means behind it. `detail`: the failed check and its words, "" on success.
    """

    task: str
    program: str
    outcome: Outcome
    score: float | None = None
    detail: str = ""
    buckets: tuple[float, ...] = field(default=())

    def __post_init__(self) -> None:
        if (self.outcome == "ok") != (self.score is not None):
            raise ValueError(f"expected a score exactly where the outcome is 'ok', got {self.outcome!r} with score {self.score!r}")
        if self.score is not None and not 0 < self.score < float("inf"):
            raise ValueError(f"expected a finite speed-up above 0, got {self.score!r}")


@dataclass(frozen=True)
class Decoded:
    """A completion that a codec understood: the program in canonical form, and the source of a module with `ModelNew`."""

    program: str
    source: str
    analysis: str = ""


@dataclass(frozen=True)
class Undecodable:
    """A completion that is no program, and why."""

    reason: str


class Codec(Protocol):
    """Between text that a model reads and writes, and programs."""

    @property
    def name(self) -> str:
        """For records; another wording is another name."""
        ...

    @property
    def marker(self) -> str:
        """The text in an answer behind which its program begins."""
        ...

    def prompt(self, task: TrainingTask, exemplars: Sequence[Exemplar] = ()) -> str:
        """What the model is shown. A pure function of its arguments."""
        ...

    def decode(self, task: TrainingTask, completion: str) -> Decoded | Undecodable:
        """The program in a completion."""
        ...


class Policy(Protocol):
    """Something that writes completions: a model, an endpoint, or hand-written rules."""

    @property
    def name(self) -> str:
        """For records, and for telling one from another."""
        ...

    def sample(self, prompts: Sequence[str], *, count: int, temperature: float, seed: int) -> list[list[str]]:
        """`count` completions for each prompt, in the order of the prompts."""
        ...


class Evaluator(Protocol):
    """Turns programs into measurements: the live judge, or a look-up of what it measured before."""

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        """One measurement for each program, in order. Infrastructure faults raise; what a program does wrong never does."""
        ...
