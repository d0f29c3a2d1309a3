"""An evaluator that looks programs up in a measured landscape instead of running them: *replay*,
which any machine can repeat.

A program that was not measured raises: no score is estimated. Noise is as it was measured: a score
is the median of seven buckets drawn with replacement from the seven of the measurement. The draw
follows from the seed, the task, the program and the number of earlier requests for it. Other
requests do not change it, so arms of an experiment that share a seed share the noise.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torch_cudal1.judge.benchmark.quoted_speedup import round_towards_one
from torch_cudal1.judge.benchmark.timing_plan import BUCKETS
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.training.ksl.grammar import Device
from torch_cudal1.training.landscape.landscape_file import LandscapeError, read_landscape
from torch_cudal1.training.landscape.rows import LandscapeRow
from torch_cudal1.training.tasks import Split, load_split

__all__ = ["ReplayEvaluator", "Unmeasured"]


class Unmeasured(LandscapeError, LookupError):
    """A program that a landscape does not hold."""


class ReplayEvaluator:
    """A `records.Evaluator` over a landscape. `facts`: where and how it was measured. `naive`:
    answer with what a naive evaluator reports.

    `seed`: of the noise; None gives every program exactly the measured score.
    """

    label = "replay"

    def __init__(
        self,
        rows: Mapping[str, Sequence[LandscapeRow]],
        facts: Mapping[str, Any],
        *,
        seed: int | None = 0,
        naive: bool = False,
    ) -> None:
        # By task and program: every reward of a replay is a look-up in here.
        self._rows = {task: {row.program: row for row in listed} for task, listed in rows.items()}
        self.facts, self.seed, self.naive = facts, seed, naive
        # How often each program was asked for: a second request draws other buckets, as a second
        # measurement would have other noise.
        self._asked: Counter[tuple[str, str]] = Counter()

    @classmethod
    def load(
        cls, path: Path | None = None, *, seed: int | None = 0, naive: bool = False
    ) -> ReplayEvaluator:
        """Load a landscape file; without a path the small CPU landscape of the package. Raises
        LandscapeError.
        """
        if path is None:
            # The package may be a zip archive, in which data has no path of its own.
            with resources.as_file(
                resources.files("torch_cudal1.training") / "data" / "cpu-landscape.json.gz"
            ) as packaged_path:
                landscape = read_landscape(packaged_path)
        else:
            landscape = read_landscape(path)
        return cls(landscape.rows, landscape.facts, seed=seed, naive=naive)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Ids of the tasks, whose programs were all measured."""
        return tuple(self._rows)

    @property
    def device(self) -> Device:
        """The device that was measured; a `KslCodec` of this device writes its programs."""
        # Of the machine that was measured. Replay itself needs no GPU.
        return "cuda" if self.facts["device"] == "cuda" else "cpu"

    def split(self) -> Split:
        """The committed split of the device's tasks, as far as they were measured."""
        split = load_split(self.device)
        parts = (split.train, split.held_out_shapes, split.held_out_families)
        # A survey ends by its budget: a landscape may lack tasks of the split, but each of those
        # that it has is whole.
        return Split(*(tuple(task for task in part if task.id in self._rows) for part in parts))

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        """A measurement of each. Raises Unmeasured for a task or a program that the landscape does
        not hold.
        """
        return [self._draw_measurement(self.row(task.id, decoded.program)) for decoded in programs]

    def row(self, task: str, program: str) -> LandscapeRow:
        """The row of a program. Raises Unmeasured."""
        if task not in self._rows:
            raise Unmeasured(
                f"the landscape has no task {task!r}; it has {len(self._rows)}, "
                f"as {next(iter(self._rows), 'none')!r}"
            )
        row = self._rows[task].get(program)
        # Estimating a missing score would let a policy be rewarded for a program that never ran.
        if row is None:
            raise Unmeasured(
                f"program {program!r} of {task} was never measured; "
                "a replay answers for measured programs only"
            )
        return row

    def optimum(self, task: str) -> Measured | None:
        """Return the best program of a task as it was measured, None where no program is right.
        Raises Unmeasured for an unknown task.
        """
        if task not in self._rows:
            raise Unmeasured(f"the landscape has no task {task!r}")
        # Exact, as every program of the task was measured: the ceiling of any search in this space.
        right = [row for row in self._rows[task].values() if row.outcome == "ok"]
        return max(right, key=lambda row: row.score or 0.0).to_measured() if right else None

    def percentile(self, task: str, score: float) -> float:
        """The share of a task's right programs that are not faster than a score, from 0 to 1; 0
        where none is right.
        """
        scores = [row.score for row in self._rows[task].values() if row.score is not None]
        return (
            sum(program_score <= score for program_score in scores) / len(scores) if scores else 0.0
        )

    def _draw_measurement(self, row: LandscapeRow) -> Measured:
        # The naive evaluator differs on refused programs only; for accepted ones the judge's score
        # stands, so that the two evaluators differ in what they believe and in nothing else.
        if self.naive and row.outcome != "ok":
            return _make_naive_measurement(row)
        # Failures have no noise: only what is measured in time is drawn again.
        if row.outcome != "ok" or self.seed is None or not row.buckets:
            return row.to_measured()
        self._asked[row.task, row.program] += 1
        # Keyed by program and not by the order of calls: arms that ask for different programs in
        # between still see the same noise for the same program (common random numbers).
        draw = random.Random(
            f"{self.seed} {row.task} {row.program} {self._asked[row.task, row.program]}"
        )
        # A bootstrap of the seven measured bucket means: noise as large as it was, and no
        # assumption about its distribution.
        buckets = tuple(draw.choices(row.buckets, k=BUCKETS))
        # A score of 0 would have no logarithm.
        score = max(0.01, round_towards_one(statistics.median(buckets)))
        return Measured(row.task, row.program, "ok", score, "", buckets)


def _make_naive_measurement(row: LandscapeRow) -> Measured:
    """A refused program as a naive evaluator reports it."""
    # The naive evaluator saw a wrong result too, or the program did not run.
    if row.naive is None:
        return Measured(row.task, row.program, "wrong", detail="naive: not close to the reference")
    return Measured(row.task, row.program, "ok", max(0.01, round_towards_one(row.naive)), "naive")
