"""Test helper: warm-ups by light workers, and what they leave behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.api import light
from tests.store.conftest import make_entry
from torch_cudal1.api.fleet import local
from torch_cudal1.api.fleet.local import LocalPool, list_cpu_slots
from torch_cudal1.api.fleet.pool import PoolReport, run_tasks
from torch_cudal1.api.fleet.warmup_journal import find_journal
from torch_cudal1.api.fleet.warmup_task import WarmupOrder, WarmupTask
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.cache.local_cache import LocalCache

FORK = multiprocessing.get_context("fork")


HANGS_S = 900  # on no machine, however busy, does a process take as long that has not stopped


def plant_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WarmupOrder:
    """Workers are light ones, and the region that they decide is in the cache."""
    monkeypatch.setattr(local, "_COMMAND", (sys.executable, "-S", light.__file__, str(tmp_path)))
    LocalCache(tmp_path / "cache").put(make_entry(region_key=light.KEY))
    return WarmupOrder(Settings(cache_dir=tmp_path / "cache"))


def count_begun(order: WarmupOrder) -> Counter[str]:
    path = order.settings.cache_dir.parent / "begun"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def run_warmup(
    order: WarmupOrder,
    *targets: str,
    workers: int = 2,
    reports: list[tuple[str, float | None]] | None = None,
) -> PoolReport:
    tasks = [WarmupTask(target) for target in targets]
    pool = LocalPool(order, list_cpu_slots(workers, sorted(os.sched_getaffinity(0))))
    progress = reports if reports is not None else []
    return run_tasks(
        tasks,
        pool,
        find_journal(order, tasks),
        lambda activity, fraction: progress.append((activity, fraction)),
    )


def list_journals(order: WarmupOrder) -> list[Path]:
    return list((order.settings.cache_dir / "warmup").glob("*.jsonl"))


def count_lines(order: WarmupOrder) -> int:
    return sum(path.read_bytes().count(b"\n") for path in list_journals(order))


def start_warmup(order: WarmupOrder, *targets: str) -> multiprocessing.process.BaseProcess:
    """The same run in a process of its own, with one worker."""

    def work() -> None:
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # as in a shell; a test runner may have another one
        try:
            run_warmup(order, *targets, workers=1)
        except KeyboardInterrupt:
            os._exit(130)

    process = FORK.Process(target=work)
    process.start()
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline and (
        targets[-1] not in count_begun(order) or count_lines(order) < len(targets) - 1
    ):
        time.sleep(0.01)
    return process


def list_workers(folder: str) -> list[int]:
    """Light workers that were started for a test's folder and still run."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        pids += [int(entry.name)] if light.__file__ in command and folder in command else []
    return pids
