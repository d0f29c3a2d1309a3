"""Evaluators that measure: `JudgeEvaluator`, the judge's `train` profile in parallel lanes, and how repeated programs are treated.

Lanes are processes of ours, each with its own oracle and candidates in sandboxes of theirs (`lane`); validation runs side by side,
timing one at a time (`gate`). A program that comes again is not measured again each time: at its 2nd, 4th, 8th ... coming it is,
and its score is the median so far, so that noise is not frozen. What a program does wrong is a `Measured` value; what this machine
does wrong raises. It keeps no journal; `database` does. What was validated here is raced again without being validated again.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import TypeAlias

import torch

from torch_cudal1 import observe
from torch_cudal1.errors import Cudal1Error
from torch_cudal1.judge.decide import conservative
from torch_cudal1.training.lane import Lane, Lap, Terms
from torch_cudal1.training.records import Decoded, Measured, TrainingTask

__all__ = ["JudgeEvaluator", "Known", "Remembered"]

Question: TypeAlias = tuple[TrainingTask, Decoded, float | None, bool]  # the task's best score so far; whether it was validated
_PERMANENT = frozenset({"compile", "wrong", "hack", "run"})


@dataclass
class Known:
    """What is known of one program of one task: all its measurements, how often it came, and whether it was found right here."""

    measured: list[Measured] = field(default_factory=list)
    comings: int = 0
    validated: bool = False

    @property
    def due(self) -> bool:
        """Whether it is to be measured at this coming: the 1st, 2nd, 4th, 8th ...; a permanent failure once only."""
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
        return replace(good[-1], score=conservative(median))


class Remembered:
    """All that was measured, by task and program, and which programs are to be measured now."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Known] = {}
        self._best: dict[str, float] = {}
        self.counts: Counter[str] = Counter()  # asked, measured, and each outcome of what was measured

    def learn(self, measured: Iterable[Measured]) -> None:
        """Take measurements of earlier runs, such as a database's."""
        for one in measured:
            self._known.setdefault((one.task, one.program), Known()).comings += 1
            self._keep(one)

    def best(self, task: str) -> float | None:
        """The highest score of a task so far: what makes a new one surprising."""
        return self._best.get(task)

    def due(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Question]:
        """The programs that are to be measured now that they came, each once."""
        wanted: dict[str, Question] = {}
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

    `lanes`: how many programs are validated side by side; 1: in this process's own sandboxes, without further processes of ours.
    `seconds`: what every step of all measurements took together, over all lanes. `told`: given each measurement as it comes.
    """

    def __init__(self, terms: Terms, *, lanes: int = 1) -> None:
        if lanes < 1:
            raise ValueError(f"{lanes} lanes; expected at least 1")
        self.terms, self.lanes = terms, lanes
        self.memory = Remembered()
        self.seconds: Counter[str] = Counter()
        self.told: Callable[[Measured], None] | None = None
        self._lane: Lane | None = None
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> JudgeEvaluator:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        if self._lane is not None:
            self._lane.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._lane = self._pool = None

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        """One measurement for each program, in order. Raises TargetError for the task, SandboxError for the machine."""
        return self.measure_all([(task, programs)])[0]

    def measure_all(self, questions: Sequence[tuple[TrainingTask, Sequence[Decoded]]]) -> list[list[Measured]]:
        """The same for several tasks, all lanes busy across them. What was measured before something was raised is remembered."""
        due = [question for task, programs in questions for question in self.memory.due(task, programs)]
        if self.lanes > 1:
            self._in_lanes(due)
        else:
            for question in due:
                self._take(self._own_lane().measure(*question))
        return [[self.memory.answer(task.id, program.program) for program in programs] for task, programs in questions]

    def _take(self, lap: Lap) -> None:
        self.seconds.update(lap.seconds)
        self.memory.take(lap.measured)
        if self.told is not None:
            self.told(lap.measured)

    def _own_lane(self) -> Lane:
        self._lane = self._lane or Lane(self.terms)
        return self._lane

    def _in_lanes(self, questions: list[Question]) -> None:
        """All at once; what a lane that died was at is asked again, one after the other: whoever ends it twice has failed."""
        errors: list[Cudal1Error] = []
        lost = [question for question, future in [(one, self._submit(one)) for one in questions] if not self._took(future, errors)]
        if lost:
            observe.record("judge", "lane_lost", "training", programs=len(lost))
        for question in lost:
            if not self._took(self._submit(question), errors):
                task, program, *_ = question
                detail = "the process that measured it ended, twice"
                self._take(Lap(Measured(task.id, program.program, "run", detail=detail), {}))
        if errors:
            raise errors[0]

    def _took(self, future: Future[Lap], errors: list[Cudal1Error]) -> bool:
        """Whether the lane lived to answer."""
        try:
            self._take(future.result())
        except BrokenProcessPool:
            return False
        except Cudal1Error as error:
            errors.append(error)
        return True

    def _submit(self, question: Question) -> Future[Lap]:
        for _ in range(2):
            if self._pool is None:
                context = get_context("forkserver")  # lanes import torch once for all of them, and inherit no CUDA context
                context.set_forkserver_preload([__name__])
                self._pool = ProcessPoolExecutor(self.lanes, context, _open_lane, (self.terms, torch.get_num_threads()))
            try:
                return self._pool.submit(_in_lane, question)
            except BrokenProcessPool:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None
        raise BrokenProcessPool("a new set of measuring processes broke before it was used")


_LANE: Lane | None = None  # of this process, if it is one of a pool


def _open_lane(terms: Terms, threads: int) -> None:
    global _LANE
    torch.set_num_threads(threads)
    _LANE = Lane(terms)


def _in_lane(question: Question) -> Lap:
    assert _LANE is not None
    return _LANE.measure(*question)
