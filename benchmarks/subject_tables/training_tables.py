"""Results of training as Markdown: the evaluator's rate, landscapes, experiments. `tables` puts
them where they belong.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import load
from benchmarks.subject_tables.table_text import make_heading
from torch_cudal1.judge.pool.measured import Outcome
from torch_cudal1.training.landscape.landscape_file import read_landscape
from torch_cudal1.training.landscape.rows import LandscapeRow
from torch_cudal1.training.tasks import load_split

__all__ = [
    "tabulate_evaluator",
    "tabulate_experiment",
    "tabulate_landscapes",
    "tabulate_training",
]

_ROOT = Path(__file__).resolve().parents[2]
_PLANS = _ROOT / "benchmarks" / "training"

_OUTCOMES: tuple[Outcome, ...] = ("ok", "wrong", "compile", "run", "hack", "unstable")


def tabulate_training(results: Path) -> list[str]:
    """The evaluator, the landscapes of the package and of plans, and experiments."""
    lines: list[str] = []
    for path in sorted(results.glob("*-evaluator.json")):
        document = load(path)
        lines += ["", *make_heading(path.name, document), *tabulate_evaluator(document)]
    package_data = _ROOT / "torch_cudal1" / "training" / "data"
    lines += tabulate_landscapes(
        [
            *sorted(package_data.glob("*-landscape.json.gz")),
            *sorted(_PLANS.glob("*-landscape.json.gz")),
        ]
    )
    for path in sorted(results.glob("*-training-*.json")):
        document = load(path)
        lines += ["", *make_heading(path.name, document), *tabulate_experiment(document)]
    return lines


def tabulate_evaluator(document: Mapping[str, Any]) -> list[str]:
    """Runs of `bench_evaluator`: the seconds of a program in its lane, without waiting for the GPU.
    Spare processes are still started during the batches after the first; the last one has none of
    that.
    """
    lines = [
        "| lanes | programs are | judged | new programs a second | in the last batch | outcomes | seconds a program, by step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(row["outcomes"].items()))
        steps = ", ".join(
            f"{name} {seconds:.3f}" for name, seconds in list(row["seconds"].items())[:8]
        )
        last = _compute_last_rate(row.get("batches", []))
        lanes = f"{row['served']} behind one server" if row.get("served") else row["lanes"]
        lines.append(
            f"| {lanes} | {row['trust']} | {row['programs']} | {row['rate']:.2f} | {last} | {outcomes} | {steps} |"
        )
    return [*lines, "", f"The goal on one H200 is {document['goal']:g} a second."]


def _compute_last_rate(batches: Sequence[Sequence[float]]) -> str:
    if len(batches) < 2:
        return "-"
    (_, before_s), (programs, done_s) = batches[-2:]
    return f"{programs / (done_s - before_s):.2f}"


def tabulate_experiment(document: Mapping[str, Any]) -> list[str]:
    """Every row of an experiment. Differences are of logarithms, or of shares where they say
    success.
    """
    plan, runs = document["plan"], document["runs"]
    lines = [
        f"{plan['name']}, plan {plan['digest']}, {runs[0]} of {runs[1]} runs; numbers: {document['label']}. {plan['endpoint']}",
        "",
    ]
    rows = {
        kind: [row for row in document["rows"] if row["what"] == kind]
        for kind in ("comparison", "difference", "arm", "stage", "evaluator")
    }
    if rows["comparison"] or rows["difference"]:
        lines += [*_tabulate_differences([*rows["comparison"], *rows["difference"]]), ""]
    if rows["arm"]:
        lines += [*_tabulate_arms(rows["arm"], document["ceilings"]), ""]
    if rows["stage"]:
        lines += [*_tabulate_stages(rows["stage"]), ""]
    if rows["evaluator"]:
        lines += [*_tabulate_cheats(rows["evaluator"]), ""]
    return lines[:-1]


def _tabulate_differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| difference | mean | 95 % interval | seeds x tasks | says |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["name"] + (" (primary)" if row.get("primary") else "")
        says = row.get("says", "excludes 0" if row["excludes_zero"] else "does not exclude 0")
        if "adjusted_p" in row and not row["primary"]:
            says += f"; p {row['adjusted_p']:.3f} by Holm"
        interval = f"[{row['low']:+.3f}, {row['high']:+.3f}]"
        lines.append(
            f"| {name} | {row['value']:+.3f} | {interval} | {row['seeds']} x {row['tasks']} | {says} |"
        )
    return lines


def _tabulate_stages(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| best of a task's samples, failures 0 | mean | largest | p75 | p50 | p25 | success | > 1.01x |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = " | ".join(f"{row[name]:.2f}" for name in ("mean", "largest", "p75", "p50", "p25"))
        lines.append(
            f"| {row['name']} | {cells} | {row['success']}/{row['tasks']} | {row['counted']} |"
        )
    return lines


def _tabulate_cheats(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| who rewards | share of cheats, first step | middle | last | speed-up it reports, last |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        steps = row["steps"]
        shares = " | ".join(f"{steps[at]['cheats']:.2f}" for at in (0, len(steps) // 2, -1))
        lines.append(f"| {row['name']} | {shares} | {steps[-1]['reported']:.2f} |")
    return lines


def _tabulate_arms(rows: Sequence[Mapping[str, Any]], ceilings: Mapping[str, float]) -> list[str]:
    names = list(rows[0]["best"])
    head = " | ".join(f"held-out {name}" for name in names)
    lines = [
        f"| arm | seeds | success | mean of samples | {head} | different programs a task |",
        "|---" * (5 + len(names)) + "|",
    ]
    for row in rows:
        best = " | ".join(f"{row['best'][name]:.3f}" for name in names)
        # older files do not say
        written = "-" if row.get("programs") is None else f"{row['programs']:.1f}"
        lines.append(
            f"| {row['name']} | {row['seeds']} | {row['success']:.3f} | {row['speedup']:.3f} | {best} | {written} |"
        )
    if ceilings:
        cells = " | ".join(
            f"{ceilings[name.split()[0]]:.3f}" if name.split()[0] in ceilings else ""
            for name in names
        )
        lines.append(f"| the best there is | | | | {cells} | |")
    return lines


def tabulate_landscapes(paths: Sequence[Path]) -> list[str]:
    """What each landscape holds, by operation."""
    lines: list[str] = []
    for path in paths:
        landscape = read_landscape(path)
        split = load_split("cuda" if landscape.facts["device"] == "cuda" else "cpu")
        held_out = {task.id for task in split.held_out}
        by_family: dict[str, list[str]] = {}
        for task in (*split.train, *split.held_out):
            if task.id in landscape.rows:
                by_family.setdefault(task.family, []).append(task.id)
        machine = landscape.facts.get("gpu") or f"CPU, {landscape.facts.get('machine', '')}"
        lines += [
            "",
            f"`{path.name}`: every program of {len(landscape.rows)} tasks, measured once; {machine}, torch {landscape.facts['torch']}. "
            "Best: geometric mean over tasks of the best program; nothing right counts as 1.",
            "",
            f"| operation | tasks, held out | programs | {' | '.join(_OUTCOMES)} | best | cheats that a trusting evaluator takes |",
            "|---" * (5 + len(_OUTCOMES)) + "|",
        ]
        lines += [
            _make_family_line(name, tasks, landscape.rows, held_out)
            for name, tasks in sorted(by_family.items())
        ]
    return lines


def _make_family_line(
    name: str, tasks: Sequence[str], rows: Mapping[str, Sequence[LandscapeRow]], held_out: set[str]
) -> str:
    family_rows = [row for task in tasks for row in rows[task]]
    counts = Counter(row.outcome for row in family_rows)
    best = [
        max([row.score for row in rows[task] if row.score is not None], default=1.0)
        for task in tasks
    ]
    cheats = [row for row in family_rows if row.outcome == "hack"]
    accepted = f"{sum(row.naive is not None for row in cheats)} of {len(cheats)}"
    geomean = math.exp(statistics.fmean(math.log(speedup) for speedup in best))
    outcomes = " | ".join(str(counts[outcome]) for outcome in _OUTCOMES)
    tested = sum(task in held_out for task in tasks)
    cells = f"{len(family_rows)} | {outcomes} | {geomean:.2f}x | {accepted}"
    return f"| {name} | {len(tasks)}, {tested} | {cells} |"
