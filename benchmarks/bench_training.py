"""A results file of an experiment with the training pipeline: `cudal1 train experiment --json >
told.json`, then `python -m benchmarks.bench_training --plan PLAN --told told.json --out OUT`.

It measures nothing. The file has the comparisons, arms and stages that
`training.experiments.comparison` computes from what the command printed; of a red-team run the
shares of cheats; with `--figure FILE` the best program so far on held-out tasks as SVG. The
environment of live results is the machine that measured them, of a replay the machine that runs
this.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import environment, make_document, save
from torch_cudal1.cli.view import plots
from torch_cudal1.training.experiments.comparison import (
    ArmComparison,
    compare_arms,
    compare_exemplar_effects,
    compare_stages,
    compute_optimum_means,
    summarize_arms,
    tabulate_stages,
)
from torch_cudal1.training.experiments.demo_plan import DEMO
from torch_cudal1.training.experiments.paired_tests import PairedDifference
from torch_cudal1.training.experiments.plan import ARMS, ExperimentPlan, read_plan
from torch_cudal1.training.experiments.policy_eval import compute_best_curves

__all__ = ["build_document", "build_rows", "main"]

Row = dict[str, Any]
_STYLE = {  # for a picture without the page's style sheet
    "--ink": "#1a1d21",
    "--muted": "#565d66",
    "--grid": "#d5d9de",
    "--first": "#2b6cb0",
    "--second": "#c05621",
    "--font": "sans-serif",
}
_MAX_CURVE_STEPS = 10  # lines of a curve that the file keeps


def build_rows(plan: ExperimentPlan, content: Mapping[str, Any]) -> list[Row]:
    """A row for each comparison, difference, arm, stage and evaluator; `what` says which it is."""
    results = content["results"]
    rows: list[Row] = []
    for comparison in compare_arms(results, plan):
        claim = {
            "primary": comparison.primary,
            "says": comparison.says,
            "adjusted_p": comparison.adjusted,
        }
        rows.append(
            {"what": "comparison", "name": _name_comparison(comparison), **claim}
            | _interval(comparison.difference)
        )
    differences = {**compare_stages(results), **compare_exemplar_effects(results, plan)}
    rows += [
        {"what": "difference", "name": name} | _interval(difference)
        for name, difference in differences.items()
    ]
    rows += [
        {"what": "arm", "name": f"{arm.arm} {arm.title}"} | asdict(arm)
        for arm in summarize_arms(results, plan)
    ]
    rows += [{"what": "stage", **asdict(as_zero), "fast": {str(p): share for p, share in as_zero.fast.items()}}
             for as_zero, _ in tabulate_stages(results)]  # fmt: skip
    for name, steps in (content.get("cheats") or {}).items():
        rows.append(
            {"what": "evaluator", "name": f"{name} evaluator", "steps": _pick_evenly(steps)}
        )
    return rows


def build_document(plan: ExperimentPlan, content: Mapping[str, Any]) -> dict[str, Any]:
    """The file as a value."""
    results = content["results"]
    labels = sorted({str(result["label"]) for result in results})
    fields = {
        "environment": environment() | _describe_machines(results),
        "label": "; ".join(labels),
        "plan": {
            "name": plan.name,
            "digest": plan.digest,
            "endpoint": plan.endpoint,
            "held_out": asdict(plan.held_out),
        },
        "runs": [len(results), len(plan.arms) * len(plan.seeds)],
        "ceilings": compute_optimum_means(results),
    }
    return make_document("training", {"plan": plan.name}, build_rows(plan, content), **fields)


def _describe_machines(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The machine of live results. Arms are compared seed by seed, so that seeds may be of
    different GPUs: then each GPU's name has its seeds behind it. Raises ValueError where one seed
    is of several machines, or versions differ.
    """
    machines: dict[int, dict[str, Any]] = {}
    for result in results:
        here = dict(result.get("machine", {}))
        if machines.setdefault(result["seed"], here) != here:
            raise ValueError(
                f"seed {result['seed']} was measured on several machines: {machines[result['seed']]} and {here}; expected one"
            )
    by_gpu: dict[str, list[int]] = {}
    for seed, machine in sorted(machines.items()):
        by_gpu.setdefault(machine.get("gpu", ""), []).append(seed)
    versions, *other_versions = [
        {k: v for k, v in machine.items() if k not in ("gpu", "driver")}
        for machine in machines.values()
    ]
    if any(other != versions for other in other_versions):
        raise ValueError(
            f"results of several versions: {list(machines.values())}; expected those of one"
        )
    drivers = sorted(
        {driver for machine in machines.values() if (driver := machine.get("driver", ""))}
    )
    gpus = [
        gpu if len(by_gpu) == 1 else f"{gpu} ({_seeds(seeds)})"
        for gpu, seeds in by_gpu.items()
        if gpu
    ]
    machine_facts = versions | ({"gpu": ", ".join(gpus)} if gpus else {})
    return machine_facts | (
        {"gpu_state": {"driver_version": ", ".join(drivers)}} if drivers else {}
    )


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def draw_figure(results: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Best so far on held-out tasks of a kind, arm by arm, with the range over seeds, as a whole
    picture; "" of nothing.
    """
    lines = []
    best_curves = compute_best_curves(results, kind)
    for arm in ARMS.values():
        curves = [
            curve
            for result, curve in zip(results, best_curves, strict=True)
            if result["arm"] == arm.name
        ]
        if not curves or not all(curves):  # nothing that can be decoded was written there
            continue
        columns = list(zip(*curves, strict=True))
        means, low, high = (
            [f(column) for column in columns] for f in (lambda c: sum(c) / len(c), min, max)
        )
        title = arm.title.partition(" (")[0]
        lines.append(
            plots.Curve(
                f"{arm.name} {title}", [float(i + 1) for i in range(len(columns))], means, low, high
            )
        )
    if not lines:
        return ""
    if (ceiling := compute_optimum_means(results).get(kind)) is not None:
        ends = [1.0, max(line.x[-1] for line in lines)]
        lines.append(plots.Curve("the best there is", ends, [ceiling, ceiling]))
    label = f"Geometric mean of the best so far, held-out tasks ({kind}), {results[0]['label']}"
    drawn = plots.plot_curves(lines, label=label, x="different programs", y="speed-up", salt=kind)
    plain = re.sub(r"var\((--\w+)\)", lambda match: _STYLE[match[1]], drawn)
    return (
        plain
        if "xmlns=" in plain
        else plain.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file; 1 where runs of the plan are missing, or its output cannot be read."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_training", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--plan", type=Path, help="the plan that was run (the demonstration's)")
    parser.add_argument(
        "--told", type=Path, required=True, help="what `cudal1 train ... --json` printed"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path, help="an SVG beside it")
    options = parser.parse_args(arguments)
    try:
        plan = DEMO if options.plan is None else read_plan(options.plan)
        experiment_output = json.loads(options.told.read_text(encoding="utf-8"))
        if experiment_output["plan"] != plan.digest:
            raise ValueError(
                f"that is of plan {experiment_output['plan']}, this one is {plan.digest}"
            )
        if not experiment_output["results"]:
            raise ValueError("it holds no result")
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(
            f"{options.told} and {options.plan}: expected a plan and what its experiment printed with --json: {error}",
            file=sys.stderr,
        )
        return 1
    try:
        written = build_document(plan, experiment_output)
    except ValueError as error:
        print(f"{options.told}: {error}", file=sys.stderr)
        return 1
    save(options.out, written)
    held_out = any(experiment_output["results"][0]["kinds"].get("shape", ()))
    if (
        options.figure is not None
        and held_out
        and plots.available()[0]
        and (drawn := draw_figure(experiment_output["results"], "shape"))
    ):
        options.figure.write_text(drawn, encoding="utf-8")
    return int(len(experiment_output["results"]) < len(plan.arms) * len(plan.seeds))


def _name_comparison(comparison: ArmComparison) -> str:
    return f"{comparison.one} - {comparison.other}, held-out {comparison.kind}"


def _interval(difference: PairedDifference) -> Row:
    return asdict(difference) | {"excludes_zero": difference.excludes_zero}


def _pick_evenly(steps: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    last = len(steps) - 1
    return [
        steps[index]
        for index in sorted(
            {round(i * last / (_MAX_CURVE_STEPS - 1)) for i in range(_MAX_CURVE_STEPS)}
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
