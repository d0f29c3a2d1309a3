"""The work of `cudal1 train`: trains a model to write kernels, stage by stage; runs the
demonstration and experiments; and writes their reports.

It turns arguments into settings of `training.runs` and `training.experiments.plan_runner`, and
their results into tables and a page. It trains nothing itself.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from torch_cudal1.ingest.llm.extras import silence_progress_bars
from torch_cudal1.judge.pool.score import ScoreRule
from torch_cudal1.training.environment import (
    RewardSource,
    load_naive_environment,
    load_replay_environment,
    open_environment,
)
from torch_cudal1.training.experiments import experiment_report
from torch_cudal1.training.experiments.comparison import compare_arms
from torch_cudal1.training.experiments.demo_plan import DEMO
from torch_cudal1.training.experiments.plan import ExperimentPlan, read_plan
from torch_cudal1.training.experiments.plan_runner import (
    ExecutionConfig,
    read_results,
    run_plan,
    run_plan_in_process,
)
from torch_cudal1.training.experiments.red_team import run_red_team
from torch_cudal1.training.runs import STAGES, RunConfig, Stage, begin_run, read_config, run_stage
from torch_cudal1.training.stages import ReportProgress

__all__ = ["run"]

# The share of the demonstration's progress bar for the arms; the red team takes the rest.
_ARMS_SHARE = 0.7


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Run one action of `cudal1 train`. Exit code 1 if samples could not be collected, or an
    experiment ended by its budget.
    """
    # transformers prints progress bars of its own, which would break the line of the screen's.
    silence_progress_bars()
    if args.action == "demo":
        return _run_demo(args, settings, screen)
    if args.action == "experiment":
        return _run_experiment(args, settings, screen)
    if args.action == "report":
        return _write_report(args, settings, screen)
    return _run_stage_action(args, settings, screen)


def _run_stage_action(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    folder: Path = args.run_folder
    # Settings are written before any process of the judge starts: a contradiction costs nothing.
    config = _make_config(args, folder)
    begin_run(folder, config)
    start_s = time.monotonic()
    with (
        screen.progress() as progress,
        open_environment(config.ground, settings, config.seed, folder) as environment,
    ):
        facts = run_stage(
            cast(Stage, args.action),
            folder,
            config,
            environment,
            resume=args.resume,
            report=progress,
        )
    # Several processes train: the first rank alone writes and shows.
    if not facts:
        return 0
    # `report` reads these files; `allow_nan=False`, since NaN is no JSON and other readers refuse
    # the file.
    (folder / f"{args.action}.json").write_text(
        json.dumps(facts, allow_nan=False), encoding="utf-8"
    )
    _show_tables(screen, _build_stage_tables(facts))
    for problem in facts.get("problems", ()):
        screen.problem(problem)
    duration = text.duration(time.monotonic() - start_s)
    screen.line(f"\n{args.action}: done in {duration}, {facts['label']}. Run: {folder}")
    screen.json(facts)
    # Part of what was asked for is missing: a script that goes on with the next stage should
    # notice.
    return 1 if facts.get("problems") else 0


def _make_config(args: argparse.Namespace, folder: Path) -> RunConfig:
    """Return the settings of the run: those in its run.json, or for a new run those of a file,
    changed by the options. Raises SettingError for an option that contradicts a run that has begun.
    """
    run_options = {
        name: value
        for name in ("seed", "model", "selector")
        # None means that the option was left out. These options have no defaults in the parser, so
        # that a resumed run does not have to repeat those that it began with.
        if (value := getattr(args, name)) is not None
    }
    reward_options = {
        name: value
        for name in ("landscape", "tasks", "device", "lanes")
        if (value := getattr(args, name)) is not None
    }
    # A flag that is left out is False, which must not undo `live` of a run that has begun.
    if args.live:
        reward_options["live"] = True
    if args.generator:
        reward_options["generators"] = tuple(args.generator)
    path = folder / "run.json"
    if path.is_file() and args.config is None:
        config = read_config(path)
        options = {**run_options, **reward_options}
        options |= {} if args.steps is None else {"steps": args.steps}
        # Silently changing a setting of a begun run would mix samples of two settings in one
        # database.
        for name, value in options.items():
            if _get_setting(config, name) != value:
                raise SettingError(
                    name,
                    value,
                    f"what the run in {folder} began with ({path.name}), or another --run",
                )
        return config
    config = read_config(args.config) if args.config is not None else RunConfig()
    config = replace(config, **run_options, ground=replace(config.ground, **reward_options))
    if args.steps is not None:
        config = replace(config, rl=replace(config.rl, steps=args.steps))
    return config


def _get_setting(config: RunConfig, name: str) -> Any:
    if hasattr(config.ground, name):
        return getattr(config.ground, name)
    return config.rl.steps if name == "steps" else getattr(config, name)


def _run_demo(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Run the arms of a small plan, then the red team, and show both."""
    start_s = time.monotonic()
    plan = DEMO if args.plan is None else read_plan(args.plan)
    plan = plan if args.landscape is None else replace(plan, landscape=args.landscape)
    folder: Path = args.run_folder
    # The affinity mask, not the number of cores: in a container or under taskset a process may use
    # fewer.
    workers = args.workers or min(len(plan.seeds), len(os.sched_getaffinity(0)))
    # half the steps are enough to see where both policies are going
    short_plan = replace(plan, rl=replace(plan.rl, steps=max(2, plan.rl.steps // 2)))
    with screen.progress() as progress:
        results = run_plan(
            plan,
            load_replay_environment,
            ExecutionConfig(folder, workers=workers),
            _scale_progress(progress, 0.0, _ARMS_SHARE),
        )
        # One thread, as each worker of the plan has: sums depend on the number of threads.
        with _one_thread():
            cheats = run_red_team(
                short_plan,
                # Seed 0 for both: the two evaluators have the same noise, and differ only in what
                # they believe.
                load_naive_environment(plan, 0),
                load_replay_environment(plan, 0),
                0,
                # Under the digest, so that a changed plan does not go on from the models of
                # another.
                folder / plan.digest / "red-team",
                _scale_progress(progress, _ARMS_SHARE, 1.0),
            )
    return _show_results(args, settings, screen, plan, results, start_s=start_s, cheats=cheats)


def _scale_progress(progress: ReportProgress, start: float, end: float) -> ReportProgress:
    """Map the fractions that a part reports, 0 to 1, to `start` to `end` of the whole."""

    def report(activity: str, fraction: float | None) -> None:
        progress(activity, None if fraction is None else start + (end - start) * fraction)

    return report


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run_experiment(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    # An endpoint that is chosen after the results are seen proves nothing.
    if args.plan is None:
        raise SettingError(
            "plan", None, "--plan FILE: what is compared is written down before the first run"
        )
    plan, start_s = _select_seed(read_plan(args.plan), args.seed), time.monotonic()
    execution = ExecutionConfig(args.run_folder, workers=args.workers or 1, budget_s=args.total_s)
    with screen.progress() as progress:
        if args.live:
            # as for landscapes: on cores that others use few buckets agree within a share of a
            # small speed-up
            rule: ScoreRule = "strict" if plan.device == "cuda" else "cudal1"
            source = RewardSource(live=True, device=plan.device, lanes=args.lanes or 1, rule=rule)
            with open_environment(source, settings, 0, args.run_folder) as environment:
                # Processes cannot share one judge and its GPU, so arms and seeds run one after the
                # other here.
                results = run_plan_in_process(
                    plan, environment.limit_tasks(plan), execution, progress
                )
        else:
            results = run_plan(plan, load_replay_environment, execution, progress)
    return _show_results(args, settings, screen, plan, results, start_s=start_s)


def _select_seed(plan: ExperimentPlan, seed: int | None) -> ExperimentPlan:
    """Return the plan with one of its seeds, for example for one of several GPUs. The digest stays
    the same.
    """
    if seed is None:
        return plan
    if seed not in plan.seeds:
        raise SettingError("--seed", seed, f"one of the plan's: {', '.join(map(str, plan.seeds))}")
    # The digest leaves out seeds: results of several machines meet in one table.
    return replace(plan, seeds=(seed,))


def _write_report(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Write the page of an experiment's results so far, or of a single run's stages."""
    folder: Path = args.run_folder
    if args.plan is not None:
        plan = read_plan(args.plan)
        results = read_results(folder, plan)
        return _show_results(args, settings, screen, plan, results, start_s=time.monotonic())
    config = read_config(folder / "run.json")
    stages = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name in STAGES
        if (path := folder / f"{name}.json").is_file()
    }
    if not stages:
        raise SettingError("run", str(folder), "a run with at least one finished stage")
    # All stages of a run have one source of rewards, which run.json fixes.
    label = next(iter(stages.values()))["label"]
    tables = [table for facts in stages.values() for table in _build_stage_tables(facts)]
    curve = stages.get("rl", {}).get("curve", ())
    page = article(
        f"Training run {folder.name}",
        f"Numbers: {label}. Seed {config.seed}.",
        [Section("Stages", [*tables]), *experiment_report.build_run_sections(curve, label)],
        doctor.as_environment(settings),
    )
    args.out.write_text(page, encoding="utf-8")
    screen.line(f"Page: {args.out}")
    screen.json({"stages": stages, "page": args.out})
    return 0


def _show_results(
    args: argparse.Namespace,
    settings: Settings,
    screen: Screen,
    plan: ExperimentPlan,
    results: list[dict[str, Any]],
    *,
    start_s: float,
    cheats: experiment_report.Cheats | None = None,
) -> int:
    """Show a plan's results as tables, a page and JSON. Exit code 1 if runs are missing."""
    page = experiment_report.render_experiment_page(
        plan, results, doctor.as_environment(settings), cheats=cheats
    )
    args.out.write_text(page, encoding="utf-8")
    _show_tables(screen, experiment_report.build_tables(plan, results))
    for name, lines in (cheats or {}).items():
        first, last = lines[0]["cheats"], lines[-1]["cheats"]
        screen.line(
            f"\n{name} evaluator: share of cheats {first:.2f} at first, {last:.2f} at the end"
        )
    planned = len(plan.arms) * len(plan.seeds)
    # Tables of an unfinished experiment are shown too, but never without saying so.
    missing = planned - len(results)
    if missing:
        screen.problem(
            f"{missing} of {planned} runs are missing; the same command goes on with them"
        )
    screen.line(f"\nTook {text.duration(time.monotonic() - start_s)}. Page: {args.out}")
    screen.json(
        {
            "plan": plan.digest,
            "results": results,
            "comparisons": compare_arms(results, plan),
            "cheats": cheats,
            "page": args.out,
        }
    )
    return 1 if missing else 0


def _show_tables(screen: Screen, tables: list[Table]) -> None:
    for table in tables:
        screen.line(f"\n{table.caption}")
        screen.table(table.columns, table.rows)


def _build_stage_tables(facts: Mapping[str, Any]) -> list[Table]:
    """Build the tables of a stage: outcomes of what was collected, and metrics of the samples on
    training tasks.
    """
    tables = []
    if "collected" in facts:
        tables.append(experiment_report.build_collect_table(facts["collected"]))
    metrics_by_row = {
        f"round {i + 1}": metrics for i, metrics in enumerate(facts.get("rounds", ()))
    }
    if "exam" in facts:
        metrics_by_row[f"after {facts['stage']}"] = facts["exam"]
    if metrics_by_row:
        names = ("success", "speedup", "speedup_of_successes", "hack", "undecodable")
        rows = [
            [row_name, *(f"{metrics[name]:.3f}" for name in names)]
            for row_name, metrics in metrics_by_row.items()
        ]
        caption = f"{facts['stage']}: samples on training tasks, {facts['label']}"
        tables.append(Table(caption, ("samples", *names), rows))
    return tables
