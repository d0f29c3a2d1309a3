"""Workers die, are killed and interrupted; every task is answered, none is done twice, and nothing
finished is lost.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.api import light
from tests.store.conftest import CONTRACT, HERE, make_entry
from torch_cudal1.api.fleet import local
from torch_cudal1.api.fleet.local import LocalPool, cpu_slots, gpu_slots
from torch_cudal1.api.fleet.pool import PoolReport, run_tasks
from torch_cudal1.api.fleet.task import WarmupOrder, WarmupTask
from torch_cudal1.api.fleet.warmup_journal import journal_for
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.cache.cache_paths import entry_path
from torch_cudal1.store.cache.local_cache import LocalCache

FORK = multiprocessing.get_context("fork")
HANGS_S = 900  # on no machine, however busy, does a process take as long that has not stopped


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WarmupOrder:
    """Workers are light ones, and the region that they decide is in the cache."""
    monkeypatch.setattr(local, "_COMMAND", (sys.executable, "-S", light.__file__, str(tmp_path)))
    LocalCache(tmp_path / "cache").put(make_entry(region_key=light.KEY))
    return WarmupOrder(Settings(cache_dir=tmp_path / "cache"))


def begun(order: WarmupOrder) -> Counter[str]:
    path = order.settings.cache_dir.parent / "begun"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def run(
    order: WarmupOrder,
    *targets: str,
    workers: int = 2,
    told: list[tuple[str, float | None]] | None = None,
) -> PoolReport:
    tasks = [WarmupTask(target) for target in targets]
    crew = LocalPool(order, cpu_slots(workers, sorted(os.sched_getaffinity(0))))
    said = told if told is not None else []
    return run_tasks(
        tasks, crew, journal_for(order, tasks), lambda what, fraction: said.append((what, fraction))
    )


def journals(order: WarmupOrder) -> list[Path]:
    return list((order.settings.cache_dir / "warmup").glob("*.jsonl"))


@pytest.mark.parametrize("workers", [1, 3])
def test_the_answers_do_not_depend_on_the_number_of_workers(
    order: WarmupOrder, workers: int
) -> None:
    targets = [f"do{i}:{0.05 * (i % 3)}" for i in range(6)]
    done = run(order, *targets, targets[0], workers=workers)
    assert [answer.task.target for answer in done.answers] == targets
    assert all(answer.is_finished and answer.keys == (light.KEY,) for answer in done.answers)
    assert begun(order) == dict.fromkeys(targets, 1)
    assert done.problems == ()
    assert journals(order) == []


def test_a_dead_workers_task_is_done_once_more(order: WarmupOrder) -> None:
    done = run(order, "do:0", "die-once", "do2:0")
    assert all(answer.is_finished for answer in done.answers)
    assert begun(order) == {"do:0": 1, "die-once": 2, "do2:0": 1}


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("die", "SIGKILL: this worker has"),
        ("half:0", "exit code 3"),
        ("garbage", "SIGKILL"),
        ("die-quietly", "worker 0 died"),
    ],
)
def test_a_task_that_kills_its_workers_is_reported_and_costs_no_other(
    order: WarmupOrder, target: str, told: str
) -> None:
    if target == "garbage":
        told = "worker 0 died"
    done = run(order, target, "do:0", "do2:0", workers=1)
    assert [answer.is_finished for answer in done.answers] == [False, True, True]
    assert told in done.answers[0].died
    assert "segmentation fault of the driver" in done.answers[0].died or target != "die"
    assert begun(order)[target] == 2
    assert len(journals(order)) == 1


def test_a_target_that_cannot_be_used_is_not_tried_twice(order: WarmupOrder) -> None:
    done = run(order, "unusable", "do:0")
    assert done.answers[0].unusable == "no such callable"
    assert begun(order) == {"unusable": 1, "do:0": 1}


def test_progress_counts_tasks_of_all_workers_and_ends_at_the_whole(order: WarmupOrder) -> None:
    told: list[tuple[str, float | None]] = []
    run(order, "do:0.05", "do2:0.05", "do3:0", told=told)
    fractions = [fraction for _, fraction in told]
    assert all(fraction is not None for fraction in fractions)
    assert fractions == sorted(fractions, key=lambda fraction: fraction or 0.0)
    assert fractions[-1] == pytest.approx(1.0)
    assert told[-1][0].startswith("3 of 3 tasks done, 0 running")


def lines(order: WarmupOrder) -> int:
    return sum(path.read_bytes().count(b"\n") for path in journals(order))


# Killed and interrupted
# --------------------------------------------------------------------------------------------------------


def started(order: WarmupOrder, *targets: str) -> multiprocessing.process.BaseProcess:
    """The same run in a process of its own, with one worker."""

    def work() -> None:
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # as in a shell; a test runner may have another one
        try:
            run(order, *targets, workers=1)
        except KeyboardInterrupt:
            os._exit(130)

    process = FORK.Process(target=work)
    process.start()
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline and (
        targets[-1] not in begun(order) or lines(order) < len(targets) - 1
    ):
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_warm_up_that_ended_early_goes_on_where_it_was(order: WarmupOrder, number: int) -> None:
    process = started(order, "do:0", "do2:0", "do3:900")
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(HANGS_S)
    assert process.exitcode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    folder, deadline = str(order.settings.cache_dir.parent), time.monotonic() + HANGS_S
    while (left := workers_of(folder)) and time.monotonic() < deadline:
        for pid in (
            left if number == signal.SIGKILL else ()
        ):  # a real worker sees the end of stdin; this one sleeps
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert left == []
    (journal,) = journals(order)
    assert len(journal.read_text().splitlines()) == 2
    with open(journal, "ab") as file:
        file.write(b'{"task": "torn')
    tasks = [WarmupTask(target) for target in ("do:0", "do2:0", "do3:900")]
    known = journal_for(order, tasks).find_finished(tasks)
    assert [task.target for task in known] == ["do:0", "do2:0"]
    assert all(answer.resumed for answer in known.values())


def workers_of(folder: str) -> list[int]:
    """Light workers that were started for a test's folder and still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        found += [int(entry.name)] if light.__file__ in command and folder in command else []
    return found


def test_finished_tasks_are_not_done_again_until_all_are_finished(order: WarmupOrder) -> None:
    targets = ("do:0", "fail", "do2:0")
    assert [answer.is_finished for answer in run(order, *targets).answers] == [True, False, True]
    again = run(order, *targets)
    assert [answer.resumed for answer in again.answers] == [True, False, True]
    assert begun(order) == {"do:0": 1, "fail": 2, "do2:0": 1}
    assert again.answers[0].result is not None
    assert again.answers[0].result.explanation == run(order, "do:0").answers[0].result.explanation  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["gone", "broken"])
def test_a_finished_task_whose_entry_is_lost_is_done_again(order: WarmupOrder, how: str) -> None:
    run(order, "do:0", "fail")
    path = entry_path(order.settings.cache_dir, light.KEY, HERE, CONTRACT)
    path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:-1])
    run(order, "do:0", "fail")
    assert begun(order)["do:0"] == 2


def test_an_edited_target_and_another_order_are_other_tasks(
    order: WarmupOrder, tmp_path: Path
) -> None:
    file = tmp_path / "model.py"
    file.write_text("a = 1")
    first = WarmupTask(f"{file}:make")
    assert (
        first.identity
        == WarmupTask(f"{file}:make").identity
        != WarmupTask(f"{file}:other").identity
    )
    before, plan = first.identity, journal_for(order, [first]).path
    assert plan != journal_for(WarmupOrder(order.settings.but(precision="strict")), [first]).path
    file.write_text("a = 2")
    assert first.identity != before
    assert WarmupTask("t", "[1]").identity != WarmupTask("t").identity


def test_a_journal_that_cannot_be_written_is_told_once_and_nothing_else_is_lost(
    order: WarmupOrder,
) -> None:
    (order.settings.cache_dir / "warmup").write_text("a file where the folder should be")
    done = run(order, "do:0", "do2:0", "fail")
    assert [answer.is_finished for answer in done.answers] == [True, True, False]
    (problem,) = done.problems
    assert "cannot be written" in problem


def test_a_torn_line_does_not_swallow_the_next(order: WarmupOrder) -> None:
    run(order, "do:0", "fail")
    (path,) = journals(order)
    path.write_bytes(b'{"torn": ')
    run(order, "do:0", "fail")
    assert [json.loads(line)["answer"]["target"] for line in path.read_text().splitlines()[1:]] == [
        "do:0"
    ]


# Seats
# -------------------------------------------------------------------------------------------------------------------------


def test_each_gpu_has_a_seat_that_sees_it_alone_and_has_its_own_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seats = gpu_slots("all", 4, range(10))
    assert [seat.variables for seat in seats] == [
        {"CUDA_VISIBLE_DEVICES": str(number)} for number in range(4)
    ]
    assert sorted(core for seat in seats for core in seat.cores) == list(range(10))
    assert [len(seat.cores) for seat in seats] == [2, 3, 2, 3]
    assert gpu_slots("2", 4, range(10)) == (
        local.WorkerSlot("the worker of GPU 2", {"CUDA_VISIBLE_DEVICES": "2"}, tuple(range(10))),
    )


def test_gpus_are_numbered_among_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-ab12")
    assert [seat.variables["CUDA_VISIBLE_DEVICES"] for seat in gpu_slots("1,0", 2, [0])] == [
        "GPU-ab12",
        "5",
    ]


@pytest.mark.parametrize("devices", ["", "4", "-1", "0,0", "zero", "0;1", "all,1"])
def test_a_gpu_that_is_not_there_is_refused_by_name(devices: str) -> None:
    with pytest.raises(SettingError, match="from 0 to 3"):
        gpu_slots(devices, 4, range(8))
    with pytest.raises(SettingError, match="no GPU"):
        gpu_slots(devices or "all", 0, range(8))
