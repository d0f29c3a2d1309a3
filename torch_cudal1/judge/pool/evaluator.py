"""`JudgeEvaluator`: evaluates programs by the judge's `train` profile in parallel slots.

The slots are trusted processes (`slots`), each with a reference process and with sandboxed
processes for its candidates (`slot`). Slots validate side by side and time one at a time
(`gpu_rw_lock`). A failure of a program is a `Measured` value; a failure of this machine raises.

A repeated program is measured when it comes for the 2nd, 4th, 8th ... time, and its score is the
median of its measurements. A program that was found correct here is only timed again. Nothing is
written to disk; the caller's database does that.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.judge.benchmark.quoted_speedup import round_towards_one
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.slot import Iteration, Slot
from torch_cudal1.judge.pool.slots import MeasurementRequest, SlotPool

__all__ = ["JudgeEvaluator", "Known", "Remembered"]

# Outcomes that another measurement would repeat.
_PERMANENT = frozenset({"compile", "wrong", "hack", "run"})


@dataclass
class Known:
    """The record of one program of one task.

    - measured: all its measurements. comings: how often it was requested.
    - validated: whether this evaluator found it correct.
    """

    measured: list[Measured] = field(default_factory=list)
    comings: int = 0
    validated: bool = False

    @property
    def due(self) -> bool:
        """Whether to measure it at this request: the 1st, 2nd, 4th, 8th ...; after a permanent
        failure, never again.
        """
        if any(one.outcome in _PERMANENT for one in self.measured):
            return False
        # Powers of two. A single measurement would freeze its noise, and one per request would cost
        # too much.
        return not self.measured or self.comings & (self.comings - 1) == 0

    @property
    def answer(self) -> Measured:
        """A permanent failure; else the median of its scores; else its last failure."""
        for one in self.measured:
            if one.outcome in _PERMANENT:
                return one
        good = [one for one in self.measured if one.score is not None]
        if not good:
            return self.measured[-1]
        median = statistics.median(one.score for one in good if one.score is not None)
        return replace(good[-1], score=round_towards_one(median))


class Remembered:
    """The records of all programs, by task; decides which to measure now."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Known] = {}
        self._best: dict[str, float] = {}
        # "asked", "measured", and each outcome of the measurements.
        self.counts: Counter[str] = Counter()

    def learn(self, measured: Iterable[Measured]) -> None:
        """Add measurements of earlier runs, such as those of a database."""
        for one in measured:
            self._known.setdefault((one.task, one.program), Known()).comings += 1
            self._keep(one)

    def best(self, task: str) -> float | None:
        """The highest score of a task so far; one far above it is confirmed in a new process."""
        return self._best.get(task)

    def due(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[MeasurementRequest]:
        """The programs to measure now, of those requested; each once."""
        wanted: dict[str, MeasurementRequest] = {}
        best = self.best(task.id)
        for program in programs:
            known = self._known.setdefault((task.id, program.program), Known())
            known.comings += 1
            if known.due:
                # A program may be in the list twice.
                wanted.setdefault(program.program, (task, program, best, known.validated))
        self.counts.update(asked=len(programs), measured=len(wanted))
        return list(wanted.values())

    def take(self, one: Measured) -> None:
        """Add a new measurement."""
        self._keep(one)
        self._known[one.task, one.program].validated |= one.score is not None
        self.counts[one.outcome] += 1

    def answer(self, task: str, program: str) -> Measured:
        """The result for a program that was measured."""
        return self._known[task, program].answer

    def _keep(self, one: Measured) -> None:
        self._known[one.task, one.program].measured.append(one)
        if one.score is not None:
            self._best[one.task] = max(one.score, self._best.get(one.task, 0.0))


class JudgeEvaluator:
    """The `records.Evaluator` that uses the judge. Use it as a context manager, from one thread.

    - lanes: number of slots; 1: one slot in this process.
    - seconds: sum over all slots of the seconds of each step.
    - told: a callback for each measurement, or None.
    """

    def __init__(self, terms: MeasurementSettings, *, lanes: int = 1) -> None:
        if lanes < 1:
            raise ValueError(f"{lanes} lanes; expected at least 1")
        self.terms, self.lanes = terms, lanes
        self.memory = Remembered()
        self.seconds: Counter[str] = Counter()
        self.told: Callable[[Measured], None] | None = None
        self._lane: Slot | None = None
        self._lanes: SlotPool | None = None

    def __enter__(self) -> JudgeEvaluator:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        if self._lane is not None:
            self._lane.close()
        if self._lanes is not None:
            self._lanes.close()
        self._lane = self._lanes = None

    @property
    def served(self) -> int:
        """How many slots share a GPU through an MPS server."""
        return self._lanes.served if self._lanes is not None else 0

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        """One measurement for each program, in order.

        Raises TargetError where the task cannot be used, SandboxError where this machine cannot
        evaluate.
        """
        return self.measure_all([(task, programs)])[0]

    def measure_all(
        self, questions: Sequence[tuple[TrainingTask, Sequence[Decoded]]]
    ) -> list[list[Measured]]:
        """As `measure`, for several tasks: a slot need not wait for the end of a task.

        Measurements before an error are kept.
        """
        due = [
            question for task, programs in questions for question in self.memory.due(task, programs)
        ]
        if self.lanes > 1:
            self._in_lanes(due)
        else:
            for question in due:
                self._take(self._own_lane().measure(*question))
        return [
            [self.memory.answer(task.id, program.program) for program in programs]
            for task, programs in questions
        ]

    def _take(self, lap: Iteration) -> None:
        self.seconds.update(lap.seconds)
        self.memory.take(lap.measured)
        if self.told is not None:
            self.told(lap.measured)

    def _own_lane(self) -> Slot:
        self._lane = self._lane or Slot(self.terms)
        return self._lane

    def _in_lanes(self, questions: list[MeasurementRequest]) -> None:
        """Measure all requests in the slots. Raises the first error after all others are done."""
        self._lanes = self._lanes or SlotPool(self.terms, self.lanes)
        # Raised last: the other requests have cost time already, and their results are kept.
        errors: list[Cudal1Error] = []
        for answer in self._lanes.answers(questions):
            if isinstance(answer, Iteration):
                self._take(answer)
            else:
                errors.append(answer)
        if errors:
            raise errors[0]
