"""`cudal1 train`: a model that writes kernels, taught stage by stage; a demonstration, experiments,
and their reports.

It turns arguments into settings of `training.runs` and `training.experiments.running`, and what
came of them into tables and a page. It trains nothing itself.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from torch_cudal1.cli.commands import doctor
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.article import Section, Table, article
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ingest.llm.extras import quiet
from torch_cudal1.judge.pool.score import Rule
from torch_cudal1.training.benches import Ground, ground_bench, naive_bench, replay_bench
from torch_cudal1.training.experiments import experiment_report
from torch_cudal1.training.experiments.comparison import comparisons
from torch_cudal1.training.experiments.demo_plan import DEMO
from torch_cudal1.training.experiments.plan import Plan, read_plan
from torch_cudal1.training.experiments.redteam import red_team
from torch_cudal1.training.experiments.running import Run, results_of, run_here
from torch_cudal1.training.experiments.running import run as run_plan
from torch_cudal1.training.runs import STAGES, RunConfig, Stage, begin, read_config, stage_of

__all__ = ["run"]


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """One action. Exit code 1 if something could not be collected, or an experiment was ended by
    its budget.
    """
    quiet()
    if args.action == "demo":
        return _demo(args, settings, screen)
    if args.action == "experiment":
        return _experiment(args, settings, screen)
    if args.action == "report":
        return _report(args, settings, screen)
    return _stage(args, settings, screen)


def _stage(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    folder: Path = args.run_folder
    config = _config(args, folder)
    begin(folder, config)
    started = time.monotonic()
    with (
        screen.progress() as progress,
        ground_bench(config.ground, settings, config.seed, folder) as bench,
    ):
        facts = stage_of(
            cast(Stage, args.action), folder, config, bench, resume=args.resume, told=progress
        )
    if not facts:  # one of several processes, and not the first
        return 0
    (folder / f"{args.action}.json").write_text(
        json.dumps(facts, allow_nan=False), encoding="utf-8"
    )
    for table in _tables(facts):
        screen.line(f"\n{table.caption}")
        screen.table(table.columns, table.rows)
    for problem in facts.get("problems", ()):
        screen.problem(problem)
    screen.line(
        f"\n{args.action}: done in {text.duration(time.monotonic() - started)}, {facts['label']}. Run: {folder}"
    )
    screen.json(facts)
    return 1 if facts.get("problems") else 0


def _config(args: argparse.Namespace, folder: Path) -> RunConfig:
    """What the run was begun with; or, for a new run, a file, changed by what was given."""
    known = folder / "run.json"
    given = {
        name: value
        for name in ("seed", "model", "selector")
        if (value := getattr(args, name)) is not None
    }
    ground = {
        name: value
        for name in ("landscape", "tasks", "device", "lanes")
        if (value := getattr(args, name)) is not None
    }
    if args.live:
        ground["live"] = True
    if args.generator:
        ground["generators"] = tuple(args.generator)
    if known.is_file() and args.config is None:
        config = read_config(known)
        asked = {**given, **ground} | ({} if args.steps is None else {"steps": args.steps})
        wrong = [name for name, value in asked.items() if _held(config, name) != value]
        if wrong:
            raise SettingError(
                wrong[0],
                asked[wrong[0]],
                f"what the run in {folder} began with ({known.name}), or another --run",
            )
        return config
    config = read_config(args.config) if args.config is not None else RunConfig()
    config = replace(config, **given, ground=replace(config.ground, **ground))
    if args.steps is not None:
        config = replace(config, rl=replace(config.rl, steps=args.steps))
    return config


def _held(config: RunConfig, name: str) -> Any:
    part: Any = (
        config.ground if hasattr(config.ground, name) else config.rl if name == "steps" else config
    )
    return getattr(part, name)


def _demo(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    folder: Path = args.run_folder
    started = time.monotonic()
    plan = DEMO if args.plan is None else read_plan(args.plan)
    plan = plan if args.landscape is None else replace(plan, landscape=args.landscape)
    with screen.progress() as progress:
        cheats = None
        how = Run(
            folder, workers=args.workers or min(len(plan.seeds), len(os.sched_getaffinity(0)))
        )
        results = run_plan(
            plan,
            replay_bench,
            how,
            lambda what, done: progress(what, None if done is None else 0.7 * done),
        )
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            told = lambda what, done: progress(what, None if done is None else 0.7 + 0.3 * done)
            short = replace(
                plan, rl=replace(plan.rl, steps=max(2, plan.rl.steps // 2))
            )  # enough to see where both are going
            cheats = red_team(
                short,
                naive_bench(plan, 0),
                replay_bench(plan, 0),
                0,
                folder / plan.digest / "red-team",
                told,
            )
        finally:
            torch.set_num_threads(before)
    return _shown(args, settings, screen, plan, results, started=started, cheats=cheats)


def _experiment(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    if args.plan is None:
        raise SettingError(
            "plan", None, "--plan FILE: what is compared is written down before the first run"
        )
    plan, started = _of_seed(read_plan(args.plan), args.seed), time.monotonic()
    how = Run(args.run_folder, workers=args.workers or 1, budget_s=args.total_s)
    with screen.progress() as progress:
        if args.live:
            # as for landscapes: on cores that others use few buckets agree within a share of a
            # small speed-up
            rule: Rule = "strict" if plan.device == "cuda" else "cudal1"
            ground = Ground(live=True, device=plan.device, lanes=args.lanes or 1, rule=rule)
            with ground_bench(ground, settings, 0, args.run_folder) as bench:
                results = run_here(plan, bench.limited(plan), how, progress)
        else:
            results = run_plan(plan, replay_bench, how, progress)
    return _shown(args, settings, screen, plan, results, started=started)


def _of_seed(plan: Plan, seed: int | None) -> Plan:
    """Only one seed of the plan's, such as for one of several GPUs; it keeps the plan's digest."""
    if seed is None:
        return plan
    if seed not in plan.seeds:
        raise SettingError("--seed", seed, f"one of the plan's: {', '.join(map(str, plan.seeds))}")
    return replace(plan, seeds=(seed,))


def _report(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    folder: Path = args.run_folder
    if args.plan is not None:
        plan = read_plan(args.plan)
        return _shown(
            args, settings, screen, plan, results_of(folder, plan), started=time.monotonic()
        )
    config = read_config(folder / "run.json")
    found = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name in STAGES
        if (path := folder / f"{name}.json").is_file()
    }
    if not found:
        raise SettingError("run", str(folder), "a run with at least one finished stage")
    label = next(iter(found.values()))["label"]
    sections = [Section("Stages", [table for facts in found.values() for table in _tables(facts)])]
    sections += experiment_report.run_sections(found.get("rl", {}).get("curve", ()), label)
    page = article(
        f"Training run {folder.name}",
        f"Numbers: {label}. Seed {config.seed}.",
        sections,
        doctor.as_environment(settings),
    )
    args.out.write_text(page, encoding="utf-8")
    screen.line(f"Page: {args.out}")
    screen.json({"stages": found, "page": args.out})
    return 0


def _shown(
    args: argparse.Namespace,
    settings: Settings,
    screen: Screen,
    plan: Plan,
    results: list[dict[str, Any]],
    **more: Any,
) -> int:
    """Tables, page and JSON of a plan's results."""
    cheats = more.get("cheats")
    page = experiment_report.experiment_page(
        plan, results, doctor.as_environment(settings), cheats=cheats
    )
    args.out.write_text(page, encoding="utf-8")
    for table in experiment_report.tables_of(plan, results):
        screen.line(f"\n{table.caption}")
        screen.table(table.columns, table.rows)
    for name, lines in (cheats or {}).items():
        screen.line(
            f"\n{name} evaluator: share of cheats {lines[0]['cheats']:.2f} at first, {lines[-1]['cheats']:.2f} at the end"
        )
    missing = len(plan.arms) * len(plan.seeds) - len(results)
    if missing:
        screen.problem(
            f"{missing} of {len(plan.arms) * len(plan.seeds)} runs are missing; the same command goes on with them"
        )
    screen.line(f"\nTook {text.duration(time.monotonic() - more['started'])}. Page: {args.out}")
    told = comparisons(results, plan)
    screen.json(
        {
            "plan": plan.digest,
            "results": results,
            "comparisons": told,
            "cheats": cheats,
            "page": args.out,
        }
    )
    return 1 if missing else 0


def _tables(facts: Mapping[str, Any]) -> list[Table]:
    tables = [experiment_report.collected_table(facts["collected"])] if "collected" in facts else []
    exams = [(f"round {i + 1}", told) for i, told in enumerate(facts.get("rounds", ()))]
    if "exam" in facts:
        exams.append((f"after {facts['stage']}", facts["exam"]))
    if exams:
        names = ("success", "speedup", "speedup_of_successes", "hack", "undecodable")
        rows = [[name, *(f"{told[each]:.3f}" for each in names)] for name, told in exams]
        tables.append(
            Table(
                f"{facts['stage']}: samples on training tasks, {facts['label']}",
                ("samples", *names),
                rows,
            )
        )
    return tables
