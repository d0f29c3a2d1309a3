"""Answers from a measured landscape instead of a device: an `Evaluator` for training that anybody
can repeat. It is *replay*.

A program that was not measured raises: nothing is estimated. Noise is as it was measured: a score
is the median of seven buckets drawn anew from the seven that were taken, by a generator that knows
the seed, the task, the program and how often it was asked, and not what else was asked; so arms of
an experiment that share a seed share the noise.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torch_cudal1.judge.checks.profiles import BUCKETS
from torch_cudal1.judge.evaluate.decide import conservative
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.training.ksl.grammar import Device
from torch_cudal1.training.landscape.packed import LandscapeError, read
from torch_cudal1.training.landscape.rows import Row
from torch_cudal1.training.tasks import Split, load_split

__all__ = ["ReplayEvaluator", "Unmeasured"]


class Unmeasured(LandscapeError, LookupError):
    """A program that a landscape does not hold."""


class ReplayEvaluator:
    """`records.Evaluator` over a landscape. `facts`: where and how it was measured. `naive`:
    believe what a trusting evaluator saw.

    `seed`: of the noise; None gives every program the score that was measured, without any.
    """

    label = "replay"

    def __init__(
        self,
        rows: Mapping[str, Sequence[Row]],
        facts: Mapping[str, Any],
        *,
        seed: int | None = 0,
        naive: bool = False,
    ) -> None:
        self._rows = {task: {row.program: row for row in listed} for task, listed in rows.items()}
        self.facts, self.seed, self.naive = facts, seed, naive
        self._asked: Counter[tuple[str, str]] = Counter()

    @classmethod
    def load(
        cls, path: Path | None = None, *, seed: int | None = 0, naive: bool = False
    ) -> ReplayEvaluator:
        """From a file; without one the small CPU landscape that comes with the package. Raises
        LandscapeError.
        """
        if path is None:
            with resources.as_file(
                resources.files("torch_cudal1.training") / "data" / "cpu-landscape.json.gz"
            ) as own:
                landscape = read(own)
        else:
            landscape = read(path)
        return cls(landscape.rows, landscape.facts, seed=seed, naive=naive)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Ids of the tasks that were measured whole."""
        return tuple(self._rows)

    @property
    def device(self) -> Device:
        """Where it was measured; a `KslCodec` of this device writes its programs."""
        return "cuda" if self.facts["device"] == "cuda" else "cpu"

    def split(self) -> Split:
        """The committed split of the device's tasks, as far as they were measured."""
        whole = load_split(self.device)
        parts = (whole.train, whole.held_out_shapes, whole.held_out_families)
        return Split(*(tuple(task for task in part if task.id in self._rows) for part in parts))

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        """What became of each. Raises Unmeasured for a task or a program that the landscape does
        not hold.
        """
        return [self._measured(self.row(task.id, decoded.program)) for decoded in programs]

    def row(self, task: str, program: str) -> Row:
        """All that is known of a program. Raises Unmeasured."""
        if task not in self._rows:
            raise Unmeasured(
                f"the landscape has no task {task!r}; it has {len(self._rows)}, as {next(iter(self._rows), 'none')!r}"
            )
        row = self._rows[task].get(program)
        if row is None:
            raise Unmeasured(
                f"program {program!r} of {task} was never measured; a replay answers for measured programs only"
            )
        return row

    def optimum(self, task: str) -> Measured | None:
        """The best program of a task as it was measured, None where none is right. Raises
        Unmeasured for an unknown task.
        """
        if task not in self._rows:
            raise Unmeasured(f"the landscape has no task {task!r}")
        right = [row for row in self._rows[task].values() if row.outcome == "ok"]
        return max(right, key=lambda row: row.score or 0.0).measured() if right else None

    def percentile(self, task: str, score: float) -> float:
        """The share of a task's right programs that are not faster than a score, from 0 to 1; 0
        where none is right.
        """
        scores = [row.score for row in self._rows[task].values() if row.score is not None]
        return sum(one <= score for one in scores) / len(scores) if scores else 0.0

    def _measured(self, row: Row) -> Measured:
        if self.naive and row.outcome != "ok":
            return _believed(row)
        if row.outcome != "ok" or self.seed is None or not row.buckets:
            return row.measured()
        self._asked[row.task, row.program] += 1
        draw = random.Random(
            f"{self.seed} {row.task} {row.program} {self._asked[row.task, row.program]}"
        )
        buckets = tuple(draw.choices(row.buckets, k=BUCKETS))
        score = max(0.01, conservative(statistics.median(buckets)))
        return Measured(row.task, row.program, "ok", score, "", buckets)


def _believed(row: Row) -> Measured:
    """A refused program as a trusting evaluator saw it."""
    if row.naive is None:
        return Measured(row.task, row.program, "wrong", detail="naive: not close to the reference")
    return Measured(row.task, row.program, "ok", max(0.01, conservative(row.naive)), "naive")
