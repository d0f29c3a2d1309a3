"""Evaluators that measure: `JudgeEvaluator`, the judge's `train` profile in parallel lanes, and how
repeated programs are treated.

SlotPool are processes of ours (`lanes`), each with its own oracle and candidates in sandboxes of
theirs (`lane`); validation runs side by side, timing one at a time (`gate`). A program that comes
again is not measured again each time: at its 2nd, 4th, 8th ... coming it is, and its score is the
median so far, so that noise is not frozen. What a program does wrong is a `Measured` value; what
this machine does wrong raises. It keeps no journal; `database` does. What was validated here is
only raced again.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.judge.evaluate.decide import round_towards_one
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.slot import Iteration, Slot
from torch_cudal1.judge.pool.slots import MeasurementRequest, SlotPool

__all__ = ["JudgeEvaluator", "Known", "Remembered"]

_PERMANENT = frozenset({"compile", "wrong", "hack", "run"})


@dataclass
class Known:
    """What is known of one program of one task: all its measurements, how often it came, and
    whether it was found right here.
    """

    measured: list[Measured] = field(default_factory=list)
    comings: int = 0
    validated: bool = False

    @property
    def due(self) -> bool:
        """Whether it is to be measured at this coming: the 1st, 2nd, 4th, 8th ...; a permanent
        failure once only.
        """
        if any(one.outcome in _PERMANENT for one in self.measured):
            return False
        return not self.measured or self.comings & (self.comings - 1) == 0

    @property
    def answer(self) -> Measured:
        """A failure that is one for good; else the median of its scores; else its last failure."""
        for one in self.measured:
            if one.outcome in _PERMANENT:
                return one
        good = [one for one in self.measured if one.score is not None]
        if not good:
            return self.measured[-1]
        median = statistics.median(one.score for one in good if one.score is not None)
        return replace(good[-1], score=round_towards_one(median))


class Remembered:
    """All that was measured, by task and program, and which programs are to be measured now."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Known] = {}
        self._best: dict[str, float] = {}
        self.counts: Counter[str] = (
            Counter()
        )  # asked, measured, and each outcome of what was measured

    def learn(self, measured: Iterable[Measured]) -> None:
        """Take measurements of earlier runs, such as a database's."""
        for one in measured:
            self._known.setdefault((one.task, one.program), Known()).comings += 1
            self._keep(one)

    def best(self, task: str) -> float | None:
        """The highest score of a task so far: what makes a new one surprising."""
        return self._best.get(task)

    def due(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[MeasurementRequest]:
        """The programs that are to be measured now that they came, each once."""
        wanted: dict[str, MeasurementRequest] = {}
        best = self.best(task.id)
        for program in programs:
            known = self._known.setdefault((task.id, program.program), Known())
            known.comings += 1
            if known.due:
                wanted.setdefault(program.program, (task, program, best, known.validated))
        self.counts.update(asked=len(programs), measured=len(wanted))
        return list(wanted.values())

    def take(self, one: Measured) -> None:
        """A measurement that was due."""
        self._keep(one)
        self._known[one.task, one.program].validated |= one.score is not None
        self.counts[one.outcome] += 1

    def answer(self, task: str, program: str) -> Measured:
        """What is known of a program that was measured."""
        return self._known[task, program].answer

    def _keep(self, one: Measured) -> None:
        self._known[one.task, one.program].measured.append(one)
        if one.score is not None:
            self._best[one.task] = max(one.score, self._best.get(one.task, 0.0))


class JudgeEvaluator:
    """`records.Evaluator` by the judge. Use it as a context manager, from one thread.

    `lanes`: how many programs are validated side by side; 1: in this process's own sandboxes,
    without further processes of ours. `seconds`: what every step of all measurements took together,
    over all lanes. `told`: given each measurement as it comes.
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
        """How many lanes share a GPU through an MPS server."""
        return self._lanes.served if self._lanes is not None else 0

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        """One measurement for each program, in order. Raises TargetError for the task, SandboxError
        for the machine.
        """
        return self.measure_all([(task, programs)])[0]

    def measure_all(
        self, questions: Sequence[tuple[TrainingTask, Sequence[Decoded]]]
    ) -> list[list[Measured]]:
        """The same for several tasks, all lanes busy across them. What was measured before
        something was raised is remembered.
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
        """All at once; what went wrong with the machine or a task is raised when everything else is
        measured.
        """
        self._lanes = self._lanes or SlotPool(self.terms, self.lanes)
        errors: list[Cudal1Error] = []
        for answer in self._lanes.answers(questions):
            if isinstance(answer, Iteration):
                self._take(answer)
            else:
                errors.append(answer)
        if errors:
            raise errors[0]
