"""A synthetic world for tests of the learner: no kernel, no measurement, an answer that is known.
Nothing outside tests uses it.

A program is two words, such as "a2 b0". Task N likes it best where the digits add up to N modulo 3;
"b2" is wrong everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask

TASKS = tuple(TrainingTask(f"t{i}", "", family="synthetic", shape=(i,)) for i in range(6))
FIRST, SECOND = tuple(f"a{i}" for i in range(4)), tuple(f"b{i}" for i in range(4))
WORDS = ("<ex>", "<go>", "slow", "fast", *(task.id for task in TASKS), *FIRST, *SECOND)


@dataclass(frozen=True)
class Program:
    """As the kernel-schedule language lists its programs."""

    text: str
    hack: str = ""


class SyntheticCodec:
    """The words of the synthetic world."""

    name = "synthetic"
    marker = "<code>"
    vocabulary = WORDS

    def programs(self, task: TrainingTask) -> list[Program]:
        return [Program(f"{first} {second}") for first in FIRST for second in SECOND]

    def prompt(self, task: TrainingTask, exemplars: Sequence[Exemplar] = ()) -> str:
        shown = [
            f"<ex> {exemplar.program} {'fast' if exemplar.score > 1 else 'slow'}"
            for exemplar in exemplars
        ]
        return " ".join([task.id, *shown, "<go>"])

    def decode(self, task: TrainingTask, completion: str) -> Decoded | Refusal:
        words = completion.split()
        if len(words) != 2 or words[0] not in FIRST or words[1] not in SECOND:
            return Refusal(f"expected a word of each kind, got {completion!r}")
        return Decoded(completion, f"# {completion}")

    def completion(
        self,
        task: TrainingTask,
        program: str,
        exemplars: Sequence[Exemplar] = (),
        *,
        analysis: bool = True,
    ) -> str:
        return program


class SyntheticEvaluator:
    """The scores of the synthetic world; counts what it was asked for. `dies_after`: raise once
    that many were measured.
    """

    def __init__(self, dies_after: int | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self._dies_after = dies_after

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        measurements = []
        for program in programs:
            if self._dies_after is not None and len(self.asked) >= self._dies_after:
                raise KeyboardInterrupt
            self.asked.append((task.id, program.program))
            measurements.append(_measure_in_world(task, program.program))
        return measurements


class Rules:
    """A policy of fixed completions, in turn."""

    def __init__(self, name: str, completions: Sequence[str]) -> None:
        self.name, self._completions, self.calls = name, completions, 0

    def sample(
        self, prompts: Sequence[str], *, count: int, temperature: float, seed: int
    ) -> list[list[str]]:
        self.calls += 1
        return [
            [self._completions[(seed + i) % len(self._completions)] for i in range(count)]
            for _ in prompts
        ]


def _measure_in_world(task: TrainingTask, program: str) -> Measured:
    first, second = (int(word[1]) for word in program.split())
    if second == 2:
        return Measured(task.id, program, "wrong", detail="output differs")
    score = 0.5 + 0.5 * ((first + second + task.shape[0]) % 4)
    return Measured(task.id, program, "ok", score, buckets=(score,) * 7)
