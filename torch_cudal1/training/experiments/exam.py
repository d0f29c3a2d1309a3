"""What a policy can do, in numbers: an exam on its tasks, a test on held-out ones without gradient,
and curves from the database.

Speed-ups are the evaluator's; a failure has none and is never averaged as if it had. Everything
goes through a recorder, so an exam that was killed goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.policy import Writer
from torch_cudal1.ingest.llm.selectors import Nothing, Selector, exemplars
from torch_cudal1.judge.pool.measured import Measured, TrainingTask
from torch_cudal1.training.experiments.plan import HeldOut
from torch_cudal1.training.recorder import Recorder, Shown, facts_of

__all__ = ["Exam", "best_curve", "best_curves", "examined", "held_out_test", "step_curve"]


@dataclass(frozen=True)
class Exam:
    """`samples` completions of every task at a temperature, with the exemplars that `selector`
    draws from what is known.
    """

    samples: int = 8
    temperature: float = 1.0
    selector: Selector = field(default_factory=Nothing)


def examined(recorder: Recorder, writer: Writer, exam: Exam) -> dict[str, Any]:
    """Facts of all samples, and the best score of each task (None: no success), as a JSON object."""
    view = recorder.view()
    drawn = [
        Shown(task, exemplars(exam.selector, recorder.seed, task.id, view))
        for task in recorder.tasks
    ]
    found = recorder.sampled(
        writer, "exam", drawn, count=exam.samples, temperature=exam.temperature
    )
    best = {}
    for i, shown in enumerate(found.shown):
        members = found.measured[i * exam.samples : (i + 1) * exam.samples]
        best[shown.task.id] = max(
            (one.score for one in members if one.score is not None), default=None
        )
    logs = [math.log(one.score) for one in found.measured if one.score is not None]
    return {
        **facts_of(found.measured),
        "log_speedup": sum(logs) / len(logs) if logs else None,
        "samples": exam.samples,
        "best": best,
    }


def held_out_test(
    recorder: Recorder, writer: Writer, selector: Selector, config: HeldOut
) -> dict[str, Any]:
    """For each task the best score after so many different programs; the database grows, the
    weights do not.

    A task is done when it has its measurements, or its samples reach the cap. Programs that
    everybody finds there do not count.
    """
    progress = {task.id: _Progress(config) for task in recorder.tasks}
    number = 0
    while active := [task for task in recorder.tasks if not progress[task.id].done]:
        view = recorder.view()
        drawn = [
            Shown(task, exemplars(selector, recorder.seed * 1_000_003 + number, task.id, view))
            for task in active
        ]
        found = recorder.sampled(
            writer, str(number), drawn, count=config.round, temperature=config.temperature
        )
        for i, shown in enumerate(found.shown):
            progress[shown.task.id].add(found.measured[i * config.round : (i + 1) * config.round])
        number += 1
    return {task: one.told() for task, one in progress.items()}


class _Progress:
    """One held-out task: `curve` holds the best score after each different program."""

    def __init__(self, config: HeldOut) -> None:
        self._config = config
        self._met: set[str] = set()
        self._curve: list[float | None] = []
        self._samples = self._successes = 0
        self._sum = 0.0

    @property
    def done(self) -> bool:
        return len(self._curve) >= self._config.measurements or self._samples >= self._config.cap

    def add(self, measured: Sequence[Measured]) -> None:
        for one in measured:
            if self.done:
                return
            self._samples += 1
            self._successes += one.score is not None
            self._sum += one.score or 0.0
            if one.outcome != "undecodable" and one.program not in self._met:
                self._met.add(one.program)
                last = self._curve[-1] if self._curve else None
                self._curve.append(last if one.score is None else max(one.score, last or 0.0))

    def told(self) -> dict[str, Any]:
        # A policy that ran out of new programs keeps its best: later measurements would have
        # brought nothing.
        best = {
            str(k): self._curve[min(k, len(self._curve)) - 1] if self._curve else None
            for k in self._config.reported
        }
        shares = {"success": self._successes / self._samples, "speedup": self._sum / self._samples}
        return {
            "best": best,
            "curve": self._curve,
            "programs": len(self._met),
            "samples": self._samples,
            **shares,
        }


def step_curve(database: Database, stage: str, tasks: Sequence[str]) -> list[dict[str, float]]:
    """For each step of a stage: facts of its samples, different programs so far, geometric mean
    over tasks of the best so far.

    A task without a success counts as 1 there: the reference runs.
    """
    steps: dict[int, list[Measured]] = {}
    for sample in database.samples():
        first, _, rest = sample.name.partition("/")
        if first == stage:
            steps.setdefault(int(rest.split("/")[0]), []).append(sample.measured)
    met: set[tuple[str, str]] = set()
    best: dict[str, float] = {}
    curve = []
    for number in sorted(steps):
        for one in steps[number]:
            if one.outcome != "undecodable":
                met.add((one.task, one.program))
            if one.score is not None:
                best[one.task] = max(one.score, best.get(one.task, 1.0))
        geomean = math.exp(sum(math.log(best.get(task, 1.0)) for task in tasks) / len(tasks))
        curve.append(
            {
                "step": float(number),
                **facts_of(steps[number]),
                "programs": float(len(met)),
                "best": geomean,
            }
        )
    return curve


def best_curves(results: Sequence[Mapping[str, Any]], kind: str) -> list[list[float]]:
    """`best_curve` of each result's own test on held-out tasks of a kind, as long as the longest: a
    policy that ran out of new programs keeps its best. One that wrote nothing there that can be
    decoded has an empty one.
    """
    curves = [
        best_curve(one["held_out"][one["own"]], one["kinds"].get(kind, ())) for one in results
    ]
    length = max(map(len, curves), default=0)
    return [curve + [curve[-1]] * (length - len(curve)) if curve else curve for curve in curves]


def best_curve(test: Mapping[str, Any], tasks: Sequence[TrainingTask | str]) -> list[float]:
    """Geometric mean over tasks of the best after 1, 2, ... different programs; 1 where nothing
    succeeded yet.
    """
    curves = [test[task if isinstance(task, str) else task.id]["curve"] for task in tasks]
    length = max(map(len, curves), default=0)
    whole = [
        [curve[min(i, len(curve) - 1)] if curve else None for i in range(length)]
        for curve in curves
    ]
    return [
        math.exp(sum(math.log(max(curve[i] or 1.0, 1.0)) for curve in whole) / len(whole))
        for i in range(length)
    ]
