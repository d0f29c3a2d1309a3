"""Compares the arms of an experiment: the pre-registered comparison, the others with Holm's
correction, and the tables.

The endpoint is the best speed-up after so many measurements on a held-out task, in logarithms,
paired by seed and task. A task without a success counts as 1, since the reference runs; so does a
task whose best program is slower. "Contrastive beats vanilla" may be claimed only where the primary
interval excludes 0. Ties and losses are results.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch_cudal1.training.experiments.paired_tests import (
    PairedDifference,
    TableRow,
    adjust_by_holm,
    build_table_row,
    compute_area,
    estimate_difference,
)
from torch_cudal1.training.experiments.plan import ARMS, COMPARISONS, PRIMARY, Arm, ExperimentPlan

__all__ = [
    "ArmComparison",
    "ArmSummary",
    "compare_arms",
    "compare_exemplar_effects",
    "compare_stages",
    "compute_optimum_means",
    "summarize_arms",
    "tabulate_stages",
]

Results = Sequence[Mapping[str, Any]]
# This share of the optimum counts as reached.
_NEAR_OPTIMUM = 0.95


@dataclass(frozen=True)
class ArmComparison:
    """Arm `one` against arm `other`. `kind`: the kind of held-out tasks. `adjusted`: p after Holm's
    correction over all comparisons but the primary one, whose p needs none.
    """

    one: str
    other: str
    kind: str
    difference: PairedDifference
    primary: bool
    adjusted: float

    @property
    def name(self) -> str:
        """Identifies the comparison among those of a plan."""
        return f"{self.one} {self.other} {self.kind}"

    @property
    def says(self) -> str:
        """The conclusion in words, from the interval alone."""
        if not self.difference.excludes_zero:
            return "no difference shown"
        return f"{self.one if self.difference.value > 0 else self.other} is better"


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its seeds: means, and standard deviations over seeds where there are several."""

    arm: str
    title: str
    seeds: int
    success: float
    speedup: float
    # of successes; None without any
    log_speedup: float | None
    # kind and measurements, such as "shape 64", to the geometric mean of the best scores
    best: Mapping[str, float]
    area: Mapping[str, float]
    # standard deviation over seeds of log best at the last measurement, of the first kind
    deviation: float | None
    # kind to the share of tasks whose best came within 5 % of the optimum; {} if that is unknown
    reached: Mapping[str, float]
    # mean number of different programs for a held-out task; None without such tasks
    programs: float | None


def compare_arms(results: Results, plan: ExperimentPlan) -> list[ArmComparison]:
    """Every comparison whose two arms have common seeds; the primary one first."""
    comparisons = []
    last = max(plan.held_out.reported)
    for arm, baseline_arm in COMPARISONS:
        for kind in _get_kinds(results):
            matrices = _pair_by_seed(results, (arm, ""), (baseline_arm, ""), kind, last)
            if matrices is not None:
                difference = estimate_difference(*matrices)
                # On held-out shapes only: on held-out families the same pair is one of the
                # corrected comparisons.
                is_primary = (arm, baseline_arm) == PRIMARY and kind == "shape"
                comparisons.append(
                    ArmComparison(arm, baseline_arm, kind, difference, is_primary, difference.p)
                )
    # The primary comparison was fixed before the first run and is one test, so it is not in the
    # family that is corrected.
    adjusted = adjust_by_holm({c.name: c.difference.p for c in comparisons if not c.primary})
    return [
        replace(c, adjusted=adjusted.get(c.name, c.difference.p))
        for c in sorted(comparisons, key=lambda c: not c.primary)
    ]


def compare_exemplar_effects(results: Results, plan: ExperimentPlan) -> dict[str, PairedDifference]:
    """Separate the two effects of exemplars on held-out shapes: trained with or without them,
    tested with or without them.
    """
    last = max(plan.held_out.reported)
    # Training with exemplars changes the weights, testing with them the prompt. A6 - A4, each with
    # its own, mixes the two.
    effects = {
        "trained with - without, tested with": (("A6", "bucket"), ("A4", "bucket")),
        "trained with - without, tested without": (("A6", "none"), ("A4", "none")),
        "tested with - without, trained with": (("A6", "bucket"), ("A6", "none")),
        "tested with - without, trained without": (("A4", "bucket"), ("A4", "none")),
    }
    differences = {}
    for name, (first_test, second_test) in effects.items():
        matrices = _pair_by_seed(results, first_test, second_test, "shape", last)
        if matrices is not None:
            differences[name] = estimate_difference(*matrices)
    return differences


def compare_stages(results: Results) -> dict[str, PairedDifference]:
    """Compare the stages by seed: success from stage 1 to stage 2, and log speed-up of the
    successes from stage 2 to A6 and to A4.
    """
    bases = _get_bases(results)
    differences = {}
    if bases:
        pairs = [
            # By seed: the models of one seed share their collected samples.
            (stage["selfsup"]["success"], stage["sft"]["success"])
            for _, stage in sorted(bases.items())
        ]
        differences["success, stage 2 - stage 1"] = _compare_by_seed(pairs)
    for arm in ("A6", "A4"):
        logs = [
            (result["exam"]["log_speedup"], result["stages"]["selfsup"]["log_speedup"])
            for result in results
            if result["arm"] == arm
        ]
        paired_logs = [
            # A stage without a success has no mean of logarithms; its seed is left out on both
            # sides.
            (after, before)
            for after, before in logs
            if after is not None and before is not None
        ]
        if paired_logs:
            differences[f"log speed-up, {arm} - stage 2"] = _compare_by_seed(paired_logs)
    return differences


def tabulate_stages(results: Results) -> list[tuple[TableRow, TableRow]]:
    """Build the paper's table of stages from the best of each task's exam samples, over all tasks
    and seeds. Each row comes twice: failures as 0, and as 1.
    """
    rows = []
    bases = _get_bases(results)
    for name, stage in (("Stage 1 (SFT)", "sft"), ("Stage 1+2", "selfsup")):
        rows.append(
            (name, [score for stages in bases.values() for score in stages[stage]["best"].values()])
        )
    for arm in ARMS.values():
        arm_results = [result for result in results if result["arm"] == arm.name]
        # Tasks times seeds: the paper has one run, so its rows have one score for each task.
        scores = [score for result in arm_results for score in result["exam"]["best"].values()]
        rows.append((f"{arm.name} {arm.title}", scores))
    return [
        # Both denominators: the paper's vanilla rows count a failure as 0, its released figures a
        # missing program as 1.
        (build_table_row(name, scores, missing=0.0), build_table_row(name, scores, missing=1.0))
        for name, scores in rows
        if scores
    ]


def summarize_arms(results: Results, plan: ExperimentPlan) -> list[ArmSummary]:
    """One line for each arm that has results."""
    return [
        _summarize_arm(arm, arm_results, plan)
        for arm in ARMS.values()
        if (arm_results := [result for result in results if result["arm"] == arm.name])
    ]


def _summarize_arm(arm: Arm, results: Results, plan: ExperimentPlan) -> ArmSummary:
    kinds = _get_kinds(results)
    # Mean over tasks, then over seeds, of logarithms: an arithmetic mean of ratios is carried by
    # single outliers.
    best = {
        f"{kind} {k}": math.exp(
            statistics.fmean(
                statistics.fmean(row) for row in _log_best_scores(results, "", kind, k)
            )
        )
        for kind in kinds
        for k in plan.held_out.reported
    }
    deviation = None
    if kinds and len(results) > 1:
        last_logs = _log_best_scores(results, "", kinds[0], max(plan.held_out.reported))
        deviation = statistics.stdev(statistics.fmean(row) for row in last_logs)
    exams = [result["exam"] for result in results]
    program_counts = [
        float(len(test["curve"]))
        for result in results
        for test in result["held_out"].get(result["own"], {}).values()
    ]
    return ArmSummary(
        arm=arm.name,
        title=arm.title,
        seeds=len(results),
        success=statistics.fmean(exam["success"] for exam in exams),
        speedup=statistics.fmean(exam["speedup"] for exam in exams),
        log_speedup=_mean_or_none(
            [exam["log_speedup"] for exam in exams if exam["log_speedup"] is not None]
        ),
        best=best,
        area={
            kind: statistics.fmean(_compute_area(result, kind) for result in results)
            for kind in kinds
        },
        deviation=deviation,
        reached={
            kind: _compute_near_optimal_share(results, kind)
            for kind in kinds
            if results[0]["optimum"]
        },
        programs=_mean_or_none(program_counts),
    )


def compute_optimum_means(results: Results) -> dict[str, float]:
    """Compute the geometric mean of the best scores there are, for the training tasks and each kind
    of held-out ones; {} where they are not known.
    """
    if not results or not results[0]["optimum"]:
        return {}
    kinds, optimum = results[0]["kinds"], results[0]["optimum"]
    held_out = {task for tasks in kinds.values() for task in tasks}
    groups = {"train": [task for task in optimum if task not in held_out], **kinds}
    return {
        # A task whose best program is slower than the reference counts as 1, as in the arms' own
        # figures.
        kind: math.exp(statistics.fmean(math.log(max(1.0, optimum[task] or 1.0)) for task in tasks))
        for kind, tasks in groups.items()
        if tasks
    }


def _get_bases(results: Results) -> dict[int, Mapping[str, Any]]:
    """Metrics of stages 1 and 2 by seed, of the arms with analysis, which share them."""
    return {
        result["seed"]: result["stages"]
        for result in results
        # Arms without analysis have other bases, which would count as further seeds.
        if not ARMS[result["arm"]].without_analysis
    }


def _pair_by_seed(
    results: Results, first_test: tuple[str, str], second_test: tuple[str, str], kind: str, k: int
) -> tuple[list[list[float]], list[list[float]]] | None:
    """Return two (seeds, tasks) matrices over the seeds that both tests have; a test is an arm and
    a selector. None where there is no such seed, or no task of that kind.
    """
    sides = [
        {
            result["seed"]: result
            for result in results
            if result["arm"] == arm and (not selector or selector in result["held_out"])
        }
        for arm, selector in (first_test, second_test)
    ]
    # Seeds without a partner are left out: arms of a seed share their chance, and an unpaired mean
    # would bring it back.
    seeds = sorted(set(sides[0]) & set(sides[1]))
    if not seeds or not sides[0][seeds[0]]["kinds"].get(kind):
        return None
    first, second = (
        _log_best_scores([side[seed] for seed in seeds], selector, kind, k)
        for side, (_, selector) in zip(sides, (first_test, second_test), strict=True)
    )
    return first, second


def _log_best_scores(results: Results, selector: str, kind: str, k: int) -> list[list[float]]:
    return [
        [
            # A task without a success, or with slower programs only, falls back to the reference:
            # 1. JSON has made the numbers of measurements strings.
            math.log(max(1.0, test["best"][str(k)] or 1.0))
            for test in _get_held_out(result, selector, kind)
        ]
        for result in results
    ]


def _get_held_out(result: Mapping[str, Any], selector: str, kind: str) -> list[Mapping[str, Any]]:
    """The held-out tests of a kind in the order of the tasks. `selector` "" stands for the arm's
    own exemplars.
    """
    tests = result["held_out"][selector or result["own"]]
    # In the order of tasks: pairs are matched by their place.
    return [tests[task] for task in result["kinds"][kind]]


def _compute_area(result: Mapping[str, Any], kind: str) -> float:
    curves = [
        # A policy that wrote nothing that decodes has an empty curve.
        [max(1.0, score or 1.0) for score in test["curve"]] or [1.0]
        for test in _get_held_out(result, "", kind)
    ]
    return statistics.fmean(compute_area(curve) for curve in curves)


def _mean_or_none(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _compute_near_optimal_share(results: Results, kind: str) -> float:
    """The share of tasks over all seeds whose best score is near the optimum. Noise can lift a
    score above the measured optimum, which counts too.
    """
    shares = []
    for result in results:
        for task, test in zip(result["kinds"][kind], _get_held_out(result, "", kind), strict=True):
            optimum, last = result["optimum"][task], test["curve"][-1] if test["curve"] else None
            shares.append(
                optimum is None or max(1.0, last or 1.0) >= _NEAR_OPTIMUM * max(1.0, optimum)
            )
    return statistics.fmean(shares)


def _get_kinds(results: Results) -> list[str]:
    return [kind for kind, tasks in results[0]["kinds"].items() if tasks] if results else []


def _compare_by_seed(pairs: Sequence[tuple[float, float]]) -> PairedDifference:
    return estimate_difference([[after] for after, _ in pairs], [[before] for _, before in pairs])
