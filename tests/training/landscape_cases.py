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
    found = CODEC.decode(task, text)
    assert not isinstance(found, Refusal), found
    return found


class Counting:
    """An evaluator that counts, and dies or has an unsteady machine when it is told to."""

    def __init__(self, *, dies_after: int = 10**9, refuses: str = "") -> None:
        self.told: Callable[[Measured], None] | None = None
        self.asked: Counter[str] = Counter()
        self._dies_after, self._refuses = dies_after, refuses

    def measure_all(
        self, questions: Sequence[tuple[TrainingTask, list[Decoded]]]
    ) -> list[list[Measured]]:
        return [self.measure(task, programs) for task, programs in questions]

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        found = []
        for one in programs:
            if sum(self.asked.values()) >= self._dies_after:
                raise SandboxError("starting", "no process can be had")
            self.asked[f"{task.id} {one.program}"] += 1
            refused = bool(self._refuses) and self._refuses in one.program
            found.append(
                Measured(task.id, one.program, "wrong")
                if refused
                else Measured(task.id, one.program, "ok", 1.0)
            )
            if self.told is not None:
                self.told(found[-1])
        return found


@pytest.fixture(scope="module")
def naive() -> Iterator[NaivePool]:
    with NaivePool(CPU) as made:
        yield made
