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

__all__ = ["JudgeEvaluator", "MeasurementMemory", "ProgramRecord"]

# Outcomes that another measurement would repeat.
_PERMANENT = frozenset({"compile", "wrong", "hack", "run"})


@dataclass
class ProgramRecord:
    """The record of one program of one task.

    - measurements: of this program, all. request_count: how often it was requested.
    - validated: whether this evaluator found it correct.
    """

    measurements: list[Measured] = field(default_factory=list)
    request_count: int = 0
    validated: bool = False

    @property
    def is_due(self) -> bool:
        """Whether to measure it at this request: the 1st, 2nd, 4th, 8th ...; after a permanent
        failure, never again.
        """
        if any(measurement.outcome in _PERMANENT for measurement in self.measurements):
            return False
        # Powers of two. A single measurement would freeze its noise, and one per request would cost
        # too much.
        return not self.measurements or self.request_count & (self.request_count - 1) == 0

    @property
    def answer(self) -> Measured:
        """A permanent failure; else the median of its scores; else its last failure."""
        for measurement in self.measurements:
            if measurement.outcome in _PERMANENT:
                return measurement
        good = [each for each in self.measurements if each.score is not None]
        if not good:
            return self.measurements[-1]
        median = statistics.median(each.score for each in good if each.score is not None)
        return replace(good[-1], score=round_towards_one(median))


class MeasurementMemory:
    """The records of all programs, by task; decides which to measure now."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], ProgramRecord] = {}
        self._best: dict[str, float] = {}
        # "asked", "measured", and each outcome of the measurements.
        self.counts: Counter[str] = Counter()

    def learn(self, measurements: Iterable[Measured]) -> None:
        """Add measurements of earlier runs, such as those of a database."""
        for measured in measurements:
            self._records.setdefault(
                (measured.task, measured.program), ProgramRecord()
            ).request_count += 1
            self._keep(measured)

    def best(self, task: str) -> float | None:
        """The highest score of a task so far; one far above it is confirmed in a new process."""
        return self._best.get(task)

    def select_due(
        self, task: TrainingTask, programs: Sequence[Decoded]
    ) -> list[MeasurementRequest]:
        """The programs to measure now, of those requested; each once."""
        selected: dict[str, MeasurementRequest] = {}
        best = self.best(task.id)
        for program in programs:
            record = self._records.setdefault((task.id, program.program), ProgramRecord())
            record.request_count += 1
            if record.is_due:
                # A program may be in the list twice.
                selected.setdefault(program.program, (task, program, best, record.validated))
        self.counts.update(asked=len(programs), measured=len(selected))
        return list(selected.values())

    def take(self, measured: Measured) -> None:
        """Add a new measurement."""
        self._keep(measured)
        self._records[measured.task, measured.program].validated |= measured.score is not None
        self.counts[measured.outcome] += 1

    def answer(self, task: str, program: str) -> Measured:
        """The result for a program that was measured."""
        return self._records[task, program].answer

    def _keep(self, measured: Measured) -> None:
        self._records[measured.task, measured.program].measurements.append(measured)
        if measured.score is not None:
            self._best[measured.task] = max(measured.score, self._best.get(measured.task, 0.0))


class JudgeEvaluator:
    """The `records.Evaluator` that uses the judge. Use it as a context manager, from one thread.

    - slots: number of slots; 1: one slot in this process.
    - seconds: sum over all slots of the seconds of each step.
    - on_measurement: a callback for each measurement, or None.
    """

    def __init__(self, config: MeasurementSettings, *, slots: int = 1) -> None:
        if slots < 1:
            raise ValueError(f"{slots} slots; expected at least 1")
        self.config, self.slots = config, slots
        self.memory = MeasurementMemory()
        self.seconds: Counter[str] = Counter()
        self.on_measurement: Callable[[Measured], None] | None = None
        self._slot: Slot | None = None
        self._slot_pool: SlotPool | None = None

    def __enter__(self) -> JudgeEvaluator:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        if self._slot is not None:
            self._slot.close()
        if self._slot_pool is not None:
            self._slot_pool.close()
        self._slot = self._slot_pool = None

    @property
    def served(self) -> int:
        """How many slots share a GPU through an MPS server."""
        return self._slot_pool.served if self._slot_pool is not None else 0

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        """One measurement for each program, in order.

        Raises TargetError where the task cannot be used, SandboxError where this machine cannot
        evaluate.
        """
        return self.measure_all([(task, programs)])[0]

    def measure_all(
        self, requests: Sequence[tuple[TrainingTask, Sequence[Decoded]]]
    ) -> list[list[Measured]]:
        """As `measure`, for several tasks: a slot need not wait for the end of a task.

        Measurements before an error are kept.
        """
        due = [
            request
            for task, programs in requests
            for request in self.memory.select_due(task, programs)
        ]
        if self.slots > 1:
            self._measure_in_slots(due)
        else:
            for request in due:
                self._take(self._get_slot().measure(*request))
        return [
            [self.memory.answer(task.id, program.program) for program in programs]
            for task, programs in requests
        ]

    def _take(self, iteration: Iteration) -> None:
        self.seconds.update(iteration.seconds)
        self.memory.take(iteration.measured)
        if self.on_measurement is not None:
            self.on_measurement(iteration.measured)

    def _get_slot(self) -> Slot:
        self._slot = self._slot or Slot(self.config)
        return self._slot

    def _measure_in_slots(self, requests: list[MeasurementRequest]) -> None:
        """Measure all requests in the slots. Raises the first error after all others are done."""
        self._slot_pool = self._slot_pool or SlotPool(self.config, self.slots)
        # Raised last: the other requests have cost time already, and their results are kept.
        errors: list[Cudal1Error] = []
        for answer in self._slot_pool.iter_answers(requests):
            if isinstance(answer, Iteration):
                self._take(answer)
            else:
                errors.append(answer)
        if errors:
            raise errors[0]
