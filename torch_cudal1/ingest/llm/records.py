"""The values that the parts of the pipeline pass to each other, and the three protocols that keep
them apart.

A *program* is what a policy writes and a codec understands: KernelBench-style source (codec `text`)
or a sentence of the kernel-schedule language (codec `ksl`). Below the codec everything is source
text and goes to the same judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask

__all__ = ["Codec", "Evaluator", "Exemplar", "Policy"]


@dataclass(frozen=True)
class Exemplar:
    """An earlier success shown in a prompt. `score`: its speed-up."""

    program: str
    score: float


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

    def decode(self, task: TrainingTask, completion: str) -> Decoded | Refusal:
        """The program in a completion."""
        ...


class Policy(Protocol):
    """Something that writes completions: a model, an endpoint, or hand-written rules."""

    @property
    def name(self) -> str:
        """For records, and for telling one from another."""
        ...

    def sample(
        self, prompts: Sequence[str], *, count: int, temperature: float, seed: int
    ) -> list[list[str]]:
        """`count` completions for each prompt, in the order of the prompts."""
        ...


class Evaluator(Protocol):
    """Turns programs into measurements: the live judge, or a look-up of what it measured before."""

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        """One measurement for each program, in order. Raises for faults of the infrastructure,
        never for a fault of a program.
        """
        ...
