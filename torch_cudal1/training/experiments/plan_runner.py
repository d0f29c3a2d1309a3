"""Runs all arms and seeds of a plan, several at a time, each in a process with one thread. A result
is written as soon as an arm is finished.

Runs go on from where they were interrupted. An end by a signal, by the budget or by the loss of a
machine costs at most the step that was being computed. Bases (a seed's models after stages 1 and 2)
come first, since the arms of a seed share one.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from torch_cudal1.ingest.llm.extras import silence_progress_bars
from torch_cudal1.training.environment import Environment
from torch_cudal1.training.experiments.arm_runner import run_arm, train_base
from torch_cudal1.training.experiments.plan import ARMS, ExperimentPlan
from torch_cudal1.training.stages import ReportProgress

__all__ = ["ExecutionConfig", "LoadEnvironment", "read_results", "run_plan", "run_plan_in_process"]

# Of a plan and a seed. Importable by name, since workers are other processes.
LoadEnvironment: TypeAlias = Callable[[ExperimentPlan, int], Environment]
# A function and its arguments.
Job: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class ExecutionConfig:
    """How a plan is run: where its results go, how many processes, and how many seconds at most
    (None: as long as it takes).
    """

    folder: Path
    workers: int = 1
    budget_s: float | None = None


def run_plan(
    plan: ExperimentPlan,
    load_environment: LoadEnvironment,
    config: ExecutionConfig,
    report: ReportProgress,
) -> list[dict[str, Any]]:
    """Run all arms and seeds. Returns the results that are finished: all of them, unless the budget
    ended first.
    """
    end = None if config.budget_s is None else time.monotonic() + config.budget_s
    missing = _list_missing(config.folder, plan)
    # Once for each seed and kind of base, in the order of seeds; a set would have no order.
    bases = dict.fromkeys((seed, not ARMS[name].without_analysis) for seed, name in missing)
    common = (plan, load_environment, config.folder)
    # Two groups, one after the other: two arms of a seed that found no base would both train it, in
    # one folder.
    job_groups: list[list[Job]] = [
        [(_run_base_job, *common, seed, analysis) for seed, analysis in bases],
        [(_run_arm_job, *common, seed, name) for seed, name in missing],
    ]
    total, finished = len(bases) + len(missing), 0
    # A finished plan starts no process.
    if missing:
        with _open_pool(config.workers) as pool:
            for jobs in job_groups:
                for _ in _run_jobs(pool, jobs, end):
                    finished += 1
                    report(f"{plan.name}: {finished} of {total} parts", finished / total)
    return read_results(config.folder, plan)


def run_plan_in_process(
    plan: ExperimentPlan,
    environment: Environment,
    config: ExecutionConfig,
    report: ReportProgress,
) -> list[dict[str, Any]]:
    """Run the plan in this process, one arm after the other, for an environment that processes
    cannot share, such as a judge with its GPU.
    """
    end = time.monotonic() + config.budget_s if config.budget_s is not None else math.inf
    missing = _list_missing(config.folder, plan)

    def report_or_stop(finished: int, activity: str, fraction: float | None) -> None:
        # `report` is called before each step, so the budget ends a run between steps; the journal
        # and the checkpoints let another call go on from there.
        if time.monotonic() >= end:
            raise _BudgetSpent
        report(
            f"run {finished + 1} of {len(missing)}: {activity}",
            (finished + (fraction or 0.0)) / len(missing),
        )

    for finished, (seed, name) in enumerate(missing):
        try:
            result = run_arm(
                plan,
                environment,
                ARMS[name],
                seed,
                _get_seed_folder(config.folder, plan, seed),
                partial(report_or_stop, finished),
            )
        except _BudgetSpent:
            break
        _write_result(config.folder, name, seed, result)
    return read_results(config.folder, plan)


class _BudgetSpent(Exception):
    """The time is up. Another call goes on from the journals and checkpoints."""


def read_results(folder: Path, plan: ExperimentPlan) -> list[dict[str, Any]]:
    """The results under `folder` that belong to this plan, by arm and seed; none of another plan's."""
    results = (_read_result(folder, name, seed) for name in plan.arms for seed in plan.seeds)
    # The names of result files have no digest, so a folder may hold those of another plan.
    return [result for result in results if result.get("plan") == plan.digest]


def _list_missing(folder: Path, plan: ExperimentPlan) -> list[tuple[int, str]]:
    """Seeds and arms without a result of this plan."""
    return [
        (seed, name)
        for seed in plan.seeds
        for name in plan.arms
        if _read_result(folder, name, seed).get("plan") != plan.digest
    ]


@contextmanager
def _open_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Open a pool whose processes end with the block, at any point of their jobs. A later call goes
    on with those jobs.
    """
    # spawn: a fork of a process in which torch has started threads may deadlock
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        # the executor has no public way to end a job that is running; shutdown() forgets them
        processes: Mapping[int, Any] = dict(getattr(pool, "_processes", None) or {})
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes.values():
            # At any point of a job: what it sampled is in a journal and its files are replaced as
            # wholes, so nothing half-written counts.
            process.terminate()
            # Waited for: a process that still held a journal's lock would have the next call
            # refused.
            process.join()


def _run_jobs(pool: ProcessPoolExecutor, jobs: Sequence[Job], end: float | None) -> Iterator[None]:
    """Yield once for each finished job, until all are finished or the time is up."""
    running: set[Future[None]] = {pool.submit(*job) for job in jobs}
    while running:
        remaining_s = None if end is None else end - time.monotonic()
        if remaining_s is not None and remaining_s <= 0:
            return
        # The first that is finished, not all: progress is shown as it comes, and the budget is
        # looked at in between.
        finished, running = wait(running, timeout=remaining_s, return_when=FIRST_COMPLETED)
        for future in finished:
            # An exception of the job is raised here: a failed arm must not look like a missing one.
            future.result()
            yield None


def _run_base_job(
    plan: ExperimentPlan,
    load_environment: LoadEnvironment,
    folder: Path,
    seed: int,
    analysis: bool,
) -> None:
    # One thread for each of several processes: with PyTorch's default each would start as many
    # threads as the machine has cores. It also makes sums independent of the machine.
    torch.set_num_threads(1)
    silence_progress_bars()
    train_base(
        plan,
        load_environment(plan, seed),
        seed,
        _get_seed_folder(folder, plan, seed),
        analysis=analysis,
    )


def _run_arm_job(
    plan: ExperimentPlan, load_environment: LoadEnvironment, folder: Path, seed: int, name: str
) -> None:
    torch.set_num_threads(1)
    silence_progress_bars()
    result = run_arm(
        plan,
        load_environment(plan, seed),
        ARMS[name],
        seed,
        _get_seed_folder(folder, plan, seed),
    )
    _write_result(folder, name, seed, result)


def _write_result(folder: Path, name: str, seed: int, result: Mapping[str, Any]) -> None:
    path = _get_result_path(folder, name, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    new_path = path.with_suffix(".new")
    # Written beside it and renamed: a result that is there is whole.
    new_path.write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
    new_path.replace(path)


def _read_result(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """The result of an arm and seed; {} where there is none."""
    path = _get_result_path(folder, name, seed)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _get_seed_folder(folder: Path, plan: ExperimentPlan, seed: int) -> Path:
    """The folder of a seed, under the plan's digest: a plan that changed starts anew beside the
    files of the earlier one.
    """
    return folder / plan.digest / f"seed-{seed}"


def _get_result_path(folder: Path, name: str, seed: int) -> Path:
    return folder / "results" / f"{name}-seed-{seed}.json"
