"""From results to what may be said: the pre-registered comparison, the others with their
correction, and the tables.

The endpoint is the best speed-up after so many measurements on a held-out task, in logarithms,
paired by seed and task. A task on which nothing succeeded counts as 1: the reference runs; so does
one whose best is slower. "Contrastive beats vanilla" is what the primary interval says when it
excludes 0, and nothing else is. Ties and losses are results.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_cudal1.training.experiments.paired_tests import (
    Difference,
    TableRow,
    auc,
    holm,
    paired_difference,
    table_row,
)
from torch_cudal1.training.experiments.plan import ARMS, COMPARISONS, PRIMARY, Plan

__all__ = [
    "Comparison",
    "Summary",
    "ceilings",
    "comparisons",
    "crossed",
    "stage_rise",
    "stage_tables",
    "summaries",
]

Results = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """`kind`: which held-out tasks. `adjusted`: p by Holm over all but the primary comparison,
    whose p needs none.
    """

    one: str
    other: str
    kind: str
    difference: Difference
    primary: bool
    adjusted: float

    @property
    def says(self) -> str:
        """In words, by the interval alone."""
        if not self.difference.excludes_zero:
            return "no difference shown"
        return f"{self.one if self.difference.value > 0 else self.other} is better"


@dataclass(frozen=True)
class Summary:
    """One arm over its seeds: means, and standard deviations over seeds where there are several."""

    arm: str
    title: str
    seeds: int
    success: float
    speedup: float
    log_speedup: float | None  # of successes; None without any
    best: Mapping[str, float]  # kind and measurements to geometric mean, such as "shape 64"
    area: Mapping[str, float]
    deviation: (
        float | None
    )  # of log best at the last measurement, held-out shapes or what there is first
    reached: Mapping[
        str, float
    ]  # kind to the share of tasks whose best came within 5 % of the best there is; {} if unknown
    programs: (
        float | None
    )  # different ones that it wrote for a held-out task; None without such tasks


def comparisons(results: Results, plan: Plan) -> list[Comparison]:
    """All that both arms have common seeds for; the primary one first."""
    found = []
    last = max(plan.held_out.reported)
    for one, other in COMPARISONS:
        for kind in _kinds(results):
            matrices = _paired(results, (one, ""), (other, ""), kind, last)
            if matrices is not None:
                primary = (one, other) == PRIMARY and kind == "shape"
                found.append(
                    Comparison(one, other, kind, paired_difference(*matrices), primary, 1.0)
                )
    adjusted = holm({f"{c.one} {c.other} {c.kind}": c.difference.p for c in found if not c.primary})
    return [
        Comparison(
            c.one,
            c.other,
            c.kind,
            c.difference,
            c.primary,
            adjusted.get(f"{c.one} {c.other} {c.kind}", c.difference.p),
        )
        for c in sorted(found, key=lambda c: not c.primary)
    ]


def crossed(results: Results, plan: Plan) -> dict[str, Difference]:
    """The two effects of exemplars apart: trained with or without, tested with or without; on
    held-out shapes.
    """
    last = max(plan.held_out.reported)
    wanted = {
        "trained with - without, tested with": (("A6", "bucket"), ("A4", "bucket")),
        "trained with - without, tested without": (("A6", "none"), ("A4", "none")),
        "tested with - without, trained with": (("A6", "bucket"), ("A6", "none")),
        "tested with - without, trained without": (("A4", "bucket"), ("A4", "none")),
    }
    found = {}
    for name, (one, other) in wanted.items():
        matrices = _paired(results, one, other, "shape", last)
        if matrices is not None:
            found[name] = paired_difference(*matrices)
    return found


def stage_rise(results: Results) -> dict[str, Difference]:
    """Success from stage 1 to stage 2, and log speed-up of the successes from stage 2 to A6 and A4;
    by seed.
    """
    bases = {one["seed"]: one["stages"] for one in results if not ARMS[one["arm"]].without_analysis}
    found = {}
    if bases:
        pairs = [
            (stage["selfsup"]["success"], stage["sft"]["success"])
            for _, stage in sorted(bases.items())
        ]
        found["success, stage 2 - stage 1"] = _by_seed(pairs)
    for arm in ("A6", "A4"):
        logs = [
            (one["exam"]["log_speedup"], one["stages"]["selfsup"]["log_speedup"])
            for one in results
            if one["arm"] == arm
        ]
        known = [
            (after, before) for after, before in logs if after is not None and before is not None
        ]
        if known:
            found[f"log speed-up, {arm} - stage 2"] = _by_seed(known)
    return found


def stage_tables(results: Results) -> list[tuple[TableRow, TableRow]]:
    """The paper's table of stages: the best of a task's exam samples, over all tasks and seeds;
    failures as 0 and as 1.
    """
    rows = []
    bases = {one["seed"]: one["stages"] for one in results if not ARMS[one["arm"]].without_analysis}
    for name, stage in (("Stage 1 (SFT)", "sft"), ("Stage 1+2", "selfsup")):
        rows.append(
            (name, [score for told in bases.values() for score in told[stage]["best"].values()])
        )
    for arm in ARMS.values():
        rows.append(
            (
                f"{arm.name} {arm.title}",
                [
                    s
                    for one in results
                    if one["arm"] == arm.name
                    for s in one["exam"]["best"].values()
                ],
            )
        )
    return [
        (table_row(name, scores, missing=0.0), table_row(name, scores, missing=1.0))
        for name, scores in rows
        if scores
    ]


def summaries(results: Results, plan: Plan) -> list[Summary]:
    """One line an arm that has results."""
    found = []
    for arm in ARMS.values():
        own = [one for one in results if one["arm"] == arm.name]
        if not own:
            continue
        kinds = _kinds(own)
        best, area, spread = {}, {}, None
        for kind in kinds:
            for k in plan.held_out.reported:
                logs = _logs(own, "", kind, k)
                best[f"{kind} {k}"] = math.exp(
                    statistics.fmean(statistics.fmean(row) for row in logs)
                )
            area[kind] = statistics.fmean(_area(one, kind) for one in own)
            if spread is None and len(own) > 1:
                spread = statistics.stdev(
                    statistics.fmean(row)
                    for row in _logs(own, "", kind, max(plan.held_out.reported))
                )
        exams = [one["exam"] for one in own]
        means = [statistics.fmean(exam[name] for exam in exams) for name in ("success", "speedup")]
        log_means = [exam["log_speedup"] for exam in exams if exam["log_speedup"] is not None]
        reached = {kind: _reached(own, kind) for kind in kinds if own[0]["optimum"]}
        written = [
            float(len(test["curve"]))
            for one in own
            for test in one["held_out"].get(one["own"], {}).values()
        ]
        facts = (means[0], means[1], _mean(log_means), best, area, spread, reached, _mean(written))
        found.append(Summary(arm.name, arm.title, len(own), *facts))
    return found


def ceilings(results: Results) -> dict[str, float]:
    """For training tasks and each kind of held-out ones the geometric mean of the best there is;
    none where it is not known.
    """
    if not results or not results[0]["optimum"]:
        return {}
    kinds, optimum = results[0]["kinds"], results[0]["optimum"]
    held_out = {task for tasks in kinds.values() for task in tasks}
    groups = {"train": [task for task in optimum if task not in held_out], **kinds}
    return {
        kind: math.exp(statistics.fmean(math.log(max(1.0, optimum[task] or 1.0)) for task in tasks))
        for kind, tasks in groups.items()
        if tasks
    }


def _paired(
    results: Results, one: tuple[str, str], other: tuple[str, str], kind: str, k: int
) -> tuple[list[list[float]], list[list[float]]] | None:
    """Two (seeds, tasks) matrices over the seeds that both have; None where there is none, or no
    task of that kind.
    """
    sides = [
        {r["seed"]: r for r in results if r["arm"] == arm and (not test or test in r["held_out"])}
        for arm, test in (one, other)
    ]
    seeds = sorted(set(sides[0]) & set(sides[1]))
    if not seeds or not sides[0][seeds[0]]["kinds"].get(kind):
        return None
    first, second = (
        _logs([side[s] for s in seeds], test, kind, k)
        for side, (_, test) in zip(sides, (one, other), strict=True)
    )
    return first, second


def _logs(results: Results, test: str, kind: str, k: int) -> list[list[float]]:
    return [
        [math.log(max(1.0, told["best"][str(k)] or 1.0)) for told in _tests(one, test, kind)]
        for one in results
    ]


def _tests(result: Mapping[str, Any], test: str, kind: str) -> list[Mapping[str, Any]]:
    """The held-out tests of a kind in the order of tasks; with the arm's own exemplars where `test`
    is "".
    """
    told = result["held_out"][test or result["own"]]
    return [told[task] for task in result["kinds"][kind]]


def _area(result: Mapping[str, Any], kind: str) -> float:
    curves = [
        [max(1.0, score or 1.0) for score in told["curve"]] or [1.0]
        for told in _tests(result, "", kind)
    ]
    return statistics.fmean(auc(curve) for curve in curves)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _reached(results: Results, kind: str) -> float:
    """Shares of tasks, over seeds. Noise can lift a score above the optimum as it was measured:
    that counts.
    """
    shares = []
    for one in results:
        for task, told in zip(one["kinds"][kind], _tests(one, "", kind), strict=True):
            optimum, last = one["optimum"][task], told["curve"][-1] if told["curve"] else None
            shares.append(optimum is None or max(1.0, last or 1.0) >= 0.95 * max(1.0, optimum))
    return statistics.fmean(shares)


def _kinds(results: Results) -> list[str]:
    return [kind for kind, tasks in results[0]["kinds"].items() if tasks] if results else []


def _by_seed(pairs: Sequence[tuple[float, float]]) -> Difference:
    return paired_difference([[after] for after, _ in pairs], [[before] for _, before in pairs])
