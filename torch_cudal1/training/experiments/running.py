"""All cells of a plan, several at a time, each in a process with one thread; a result is written as
soon as a cell is done.

Cells go on from where they were, so an end by signal, by budget or by a machine that disappears
costs at most the step that was being computed. Bases (a seed's models after stages 1 and 2) come
first, since a seed's cells share one.
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

from torch_cudal1.ingest.llm.extras import quiet
from torch_cudal1.training.experiments.experiment import Bench, base_of, cell_of
from torch_cudal1.training.experiments.plan import ARMS, Plan

__all__ = ["MakeBench", "Run", "results_of", "run", "run_here"]

MakeBench: TypeAlias = Callable[
    [Plan, int], Bench
]  # of a plan and a seed; importable by name: workers are other processes
Told: TypeAlias = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Run:
    """How a plan is run: where its results go, how many processes, and how many seconds at most
    (None: as long as it takes).
    """

    folder: Path
    workers: int = 1
    budget_s: float | None = None


def run(plan: Plan, make_bench: MakeBench, how: Run, told: Told) -> list[dict[str, Any]]:
    """Results of all cells that are done when this returns: all of them, unless the budget ended
    first.
    """
    end = time.monotonic() + how.budget_s if how.budget_s is not None else None
    cells = [
        (seed, name)
        for seed in plan.seeds
        for name in plan.arms
        if _missing(how.folder, plan, name, seed)
    ]
    bases = dict.fromkeys((seed, not ARMS[name].without_analysis) for seed, name in cells)
    jobs: list[Sequence[tuple[Any, ...]]] = [
        [(_base, plan, make_bench, seed, analysis, how.folder) for seed, analysis in bases],
        [(_cell, plan, make_bench, seed, name, how.folder) for seed, name in cells],
    ]
    total, done = len(bases) + len(cells), 0
    if cells:
        with _pool(how.workers) as pool:
            for listed in jobs:
                for _ in _finished(pool, listed, end):
                    done += 1
                    told(f"{plan.name}: {done} of {total} parts", done / total)
    return results_of(how.folder, plan)


def run_here(plan: Plan, bench: Bench, how: Run, told: Told) -> list[dict[str, Any]]:
    """The same one after the other in this process, on a bench that cannot be shared, such as a
    judge with its GPU.
    """
    end = time.monotonic() + how.budget_s if how.budget_s is not None else math.inf
    cells = [
        (seed, name)
        for seed in plan.seeds
        for name in plan.arms
        if _missing(how.folder, plan, name, seed)
    ]

    def watched(done: int, what: str, fraction: float | None) -> None:
        if time.monotonic() >= end:
            raise _TimeUp
        told(f"run {done + 1} of {len(cells)}: {what}", (done + (fraction or 0.0)) / len(cells))

    for done, (seed, name) in enumerate(cells):
        try:
            found = cell_of(
                plan, bench, ARMS[name], seed, _home(how.folder, plan, seed), partial(watched, done)
            )
        except _TimeUp:
            break
        _store(how.folder, name, seed, found)
    return results_of(how.folder, plan)


class _TimeUp(Exception):
    """The budget is spent; what is on record goes on another time."""


def results_of(folder: Path, plan: Plan) -> list[dict[str, Any]]:
    """The results under `folder` that belong to this plan, by arm and seed; none of another plan's."""
    found = []
    for name in plan.arms:
        for seed in plan.seeds:
            path = _result(folder, name, seed)
            told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            if told.get("plan") == plan.digest:
                found.append(told)
    return found


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with the block, whatever they are doing: what they were at goes on another
    time.
    """
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        processes: Mapping[int, Any] = dict(getattr(pool, "_processes", None) or {})
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes.values():
            process.terminate()
            process.join()


def _finished(
    pool: ProcessPoolExecutor, jobs: Sequence[tuple[Any, ...]], end: float | None
) -> Iterator[None]:
    """One item a finished job, until all are done or the time is up."""
    running: set[Future[None]] = {pool.submit(*job) for job in jobs}
    while running:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            return
        finished, running = wait(running, timeout=left, return_when=FIRST_COMPLETED)
        for one in finished:
            one.result()
            yield None


def _base(plan: Plan, make_bench: MakeBench, seed: int, analysis: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    quiet()
    base_of(plan, make_bench(plan, seed), seed, _home(folder, plan, seed), analysis=analysis)


def _cell(plan: Plan, make_bench: MakeBench, seed: int, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    quiet()
    _store(
        folder,
        name,
        seed,
        cell_of(plan, make_bench(plan, seed), ARMS[name], seed, _home(folder, plan, seed)),
    )


def _store(folder: Path, name: str, seed: int, found: Mapping[str, Any]) -> None:
    path = _result(folder, name, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(found, allow_nan=False), encoding="utf-8")
    fresh.replace(path)


def _missing(folder: Path, plan: Plan, name: str, seed: int) -> bool:
    path = _result(folder, name, seed)
    return (
        not path.is_file()
        or json.loads(path.read_text(encoding="utf-8")).get("plan") != plan.digest
    )


def _home(folder: Path, plan: Plan, seed: int) -> Path:
    """A plan that changed starts anew, beside what the earlier one left."""
    return folder / plan.digest / f"seed-{seed}"


def _result(folder: Path, name: str, seed: int) -> Path:
    return folder / "results" / f"{name}-seed-{seed}.json"
