"""Programs of the CPU landscape, and evaluators that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.ops import make_task
from torch_cudal1.training.landscape.naive_pool import NaivePool

CPU = torch.device("cpu")


CODEC = KslCodec("cpu")


TASK = make_task("avg_pool1d", (3, 7, 66))


RIGHT = "tpl=pool.shifts rows=4 fuse=inplace mask=on acc=f32"


def program(task: TrainingTask, text: str) -> Decoded:
    decoded = CODEC.decode(task, text)
    assert not isinstance(decoded, Refusal), decoded
    return decoded


class CountingEvaluator:
    """An evaluator that counts, and dies or has an unsteady machine where the test says so."""

    def __init__(self, *, dies_after: int = 10**9, refuses: str = "") -> None:
        self.on_measurement: Callable[[Measured], None] | None = None
        self.asked: Counter[str] = Counter()
        self._dies_after, self._refuses = dies_after, refuses

    def measure_all(
        self, questions: Sequence[tuple[TrainingTask, list[Decoded]]]
    ) -> list[list[Measured]]:
        return [self.measure(task, programs) for task, programs in questions]

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        measurements = []
        for candidate in programs:
            if sum(self.asked.values()) >= self._dies_after:
                raise SandboxError("starting", "no process can be had")
            self.asked[f"{task.id} {candidate.program}"] += 1
            is_refused = bool(self._refuses) and self._refuses in candidate.program
            measurements.append(
                Measured(task.id, candidate.program, "wrong")
                if is_refused
                else Measured(task.id, candidate.program, "ok", 1.0)
            )
            if self.on_measurement is not None:
                self.on_measurement(measurements[-1])
        return measurements


@pytest.fixture(scope="module")
def naive() -> Iterator[NaivePool]:
    with NaivePool(CPU) as pool:
        yield pool
