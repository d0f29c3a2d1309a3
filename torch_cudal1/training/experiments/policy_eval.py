"""Evaluates a policy on its training tasks and, without gradients, on held-out tasks, and computes
curves from the database.

Speed-ups are the evaluator's. A failure has no score and is never averaged as if it had one. All
samples go through a recorder, so an evaluation that was killed goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.policy import LanguageModel
from torch_cudal1.ingest.llm.selectors import Nothing, Selector, select_exemplars
from torch_cudal1.judge.pool.measured import Measured, TrainingTask
from torch_cudal1.training.experiments.plan import HeldOut
from torch_cudal1.training.recorder import Recorder, TaskPrompt, summarize_outcomes

__all__ = [
    "PolicyEvalConfig",
    "compute_best_curve",
    "compute_best_curves",
    "compute_step_curve",
    "evaluate_held_out",
    "evaluate_policy",
]


@dataclass(frozen=True)
class PolicyEvalConfig:
    """`samples` completions of every task at a temperature, with the exemplars that `selector`
    draws.
    """

    samples: int = 8
    temperature: float = 1.0
    selector: Selector = field(default_factory=Nothing)


def evaluate_policy(
    recorder: Recorder, writer: LanguageModel, config: PolicyEvalConfig
) -> dict[str, Any]:
    """Metrics of all samples, and the best score of each task (None: no success), as a JSON
    object.
    """
    # One view for all tasks; the exam's own samples are not in it.
    view = recorder.view()
    prompts = [
        TaskPrompt(task, select_exemplars(config.selector, recorder.seed, task.id, view))
        for task in recorder.tasks
    ]
    batch = recorder.sample(
        writer, "exam", prompts, count=config.samples, temperature=config.temperature
    )
    best = {}
    for i, prompt in enumerate(batch.prompts):
        group = batch.measurements[i * config.samples : (i + 1) * config.samples]
        best[prompt.task.id] = max(
            (measurement.score for measurement in group if measurement.score is not None),
            default=None,
        )
    # Successes only: a failure has no speed, and `success` says how many there were.
    log_scores = [
        math.log(measurement.score)
        for measurement in batch.measurements
        if measurement.score is not None
    ]
    return {
        **summarize_outcomes(batch.measurements),
        "log_speedup": sum(log_scores) / len(log_scores) if log_scores else None,
        "samples": config.samples,
        "best": best,
    }


def evaluate_held_out(
    recorder: Recorder, writer: LanguageModel, selector: Selector, config: HeldOut
) -> dict[str, Any]:
    """Test a policy on held-out tasks: for each task the best score by number of different
    programs. The database grows, the weights do not change.

    A task is finished when it has its measurements, or when its samples reach the cap. The programs
    that every arm is shown do not count.
    """
    progress = {task.id: _HeldOutProgress(config) for task in recorder.tasks}
    number = 0
    # A finished task is sampled no more: the budget is of each task.
    while active := [task for task in recorder.tasks if not progress[task.id].is_finished]:
        view = recorder.view()
        # Exemplars are drawn anew in each round, from a view that has the round before: this is how
        # an arm with exemplars can improve without gradients.
        seed = recorder.seed * 1_000_003 + number
        prompts = [
            TaskPrompt(task, select_exemplars(selector, seed, task.id, view)) for task in active
        ]
        batch = recorder.sample(
            writer, str(number), prompts, count=config.round, temperature=config.temperature
        )
        for i, prompt in enumerate(batch.prompts):
            progress[prompt.task.id].add(
                batch.measurements[i * config.round : (i + 1) * config.round]
            )
        number += 1
    return {task: task_progress.to_json() for task, task_progress in progress.items()}


class _HeldOutProgress:
    """One held-out task. `_best_scores` holds the best score after each different program."""

    def __init__(self, config: HeldOut) -> None:
        self._config = config
        self._programs: set[str] = set()
        self._best_scores: list[float | None] = []
        self._samples = self._successes = 0
        self._score_sum = 0.0

    @property
    def is_finished(self) -> bool:
        enough_programs = len(self._best_scores) >= self._config.measurements
        return enough_programs or self._samples >= self._config.cap

    def add(self, measurements: Sequence[Measured]) -> None:
        for measurement in measurements:
            # In the middle of a round: samples beyond the limit are not counted, or a large round
            # would be an advantage.
            if self.is_finished:
                return
            score, program = measurement.score, measurement.program
            self._samples += 1
            self._successes += score is not None
            self._score_sum += score or 0.0
            # Text that is no program costs no measurement, and a program that comes again costs
            # none either.
            if measurement.outcome != "undecodable" and program not in self._programs:
                self._programs.add(program)
                last = self._best_scores[-1] if self._best_scores else None
                # A failure keeps the best so far: it has cost a measurement.
                self._best_scores.append(last if score is None else max(score, last or 0.0))

    def to_json(self) -> dict[str, Any]:
        # a policy that ran out of new programs keeps its best: later measurements would have
        # brought nothing
        curve = self._best_scores
        best = {
            str(k): curve[min(k, len(curve)) - 1] if curve else None for k in self._config.reported
        }
        return {
            "best": best,
            "curve": curve,
            "programs": len(self._programs),
            "samples": self._samples,
            "success": self._successes / self._samples,
            "speedup": self._score_sum / self._samples,
        }


def compute_step_curve(
    database: Database, stage: str, tasks: Sequence[str]
) -> list[dict[str, float]]:
    """For each step of a stage: metrics of its samples, the number of different programs so far,
    and the geometric mean over tasks of the best score so far.
    """
    steps: dict[int, list[Measured]] = {}
    for sample in database.samples():
        sample_stage, _, rest = sample.name.partition("/")
        if sample_stage == stage:
            steps.setdefault(int(rest.split("/")[0]), []).append(sample.measured)
    programs: set[tuple[str, str]] = set()
    best: dict[str, float] = {}
    curve = []
    for number in sorted(steps):
        for measurement in steps[number]:
            task, score = measurement.task, measurement.score
            if measurement.outcome != "undecodable":
                programs.add((task, measurement.program))
            if score is not None:
                # Never below 1: where every program is slower, a user keeps the reference.
                best[task] = max(score, best.get(task, 1.0))
        # a task without a success counts as 1: the reference runs
        log_sum = sum(math.log(best.get(task, 1.0)) for task in tasks)
        curve.append(
            {
                "step": float(number),
                **summarize_outcomes(steps[number]),
                "programs": float(len(programs)),
                "best": math.exp(log_sum / len(tasks)),
            }
        )
    return curve


def compute_best_curves(results: Sequence[Mapping[str, Any]], kind: str) -> list[list[float]]:
    """Return `compute_best_curve` of each result's own test on held-out tasks of a kind. All curves
    are as long as the longest: a policy that ran out of new programs keeps its best. The curve of a
    policy whose completions all fail to decode is empty.
    """
    curves = [
        compute_best_curve(result["held_out"][result["own"]], result["kinds"].get(kind, ()))
        for result in results
    ]
    length = max(map(len, curves), default=0)
    # Cut to the shortest, one seed that ran out of programs would hide what all others did later.
    return [curve + [curve[-1]] * (length - len(curve)) if curve else curve for curve in curves]


def compute_best_curve(test: Mapping[str, Any], tasks: Sequence[TrainingTask | str]) -> list[float]:
    """Geometric mean over tasks of the best score after 1, 2, ... different programs. A task
    without a success so far counts as 1.
    """
    curves = [test[task if isinstance(task, str) else task.id]["curve"] for task in tasks]
    length = max(map(len, curves), default=0)
    extended_curves = [
        [curve[min(i, len(curve) - 1)] if curve else None for i in range(length)]
        for curve in curves
    ]
    return [
        math.exp(
            sum(math.log(max(curve[i] or 1.0, 1.0)) for curve in extended_curves)
            / len(extended_curves)
        )
        for i in range(length)
    ]
