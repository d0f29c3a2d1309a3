"""A warm-up that ended early goes on where it was, as long as what it finished can still be read."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.api import light
from tests.api.light_runs import (
    HANGS_S,
    count_begun,
    list_journals,
    list_workers,
    plant_order,
    run_warmup,
    start_warmup,
)
from tests.store.conftest import CONTRACT, HERE
from torch_cudal1.api.fleet.warmup_journal import find_journal
from torch_cudal1.api.fleet.warmup_task import WarmupOrder, WarmupTask
from torch_cudal1.store.cache.cache_paths import entry_path


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WarmupOrder:
    return plant_order(tmp_path, monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_warm_up_that_ended_early_goes_on_where_it_was(order: WarmupOrder, number: int) -> None:
    process = start_warmup(order, "do:0", "do2:0", "do3:900")
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(HANGS_S)
    assert process.exitcode == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    folder, deadline = str(order.settings.cache_dir.parent), time.monotonic() + HANGS_S
    while (pids := list_workers(folder)) and time.monotonic() < deadline:
        for pid in (
            pids if number == signal.SIGKILL else ()
        ):  # a real worker sees the end of stdin; this one sleeps
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert pids == []
    (journal,) = list_journals(order)
    assert len(journal.read_text().splitlines()) == 2
    with open(journal, "ab") as file:
        file.write(b'{"task": "torn')
    tasks = [WarmupTask(target) for target in ("do:0", "do2:0", "do3:900")]
    finished = find_journal(order, tasks).find_finished(tasks)
    assert [task.target for task in finished] == ["do:0", "do2:0"]
    assert all(answer.resumed for answer in finished.values())


def test_finished_tasks_are_not_done_again_until_all_are_finished(order: WarmupOrder) -> None:
    targets = ("do:0", "fail", "do2:0")
    assert [answer.is_finished for answer in run_warmup(order, *targets).answers] == [
        True,
        False,
        True,
    ]
    again = run_warmup(order, *targets)
    assert [answer.resumed for answer in again.answers] == [True, False, True]
    assert count_begun(order) == {"do:0": 1, "fail": 2, "do2:0": 1}
    assert again.answers[0].result is not None
    assert (
        again.answers[0].result.explanation
        == run_warmup(order, "do:0").answers[0].result.explanation
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["gone", "broken"])
def test_a_finished_task_whose_entry_is_lost_is_done_again(order: WarmupOrder, how: str) -> None:
    run_warmup(order, "do:0", "fail")
    path = entry_path(order.settings.cache_dir, light.KEY, HERE, CONTRACT)
    path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:-1])
    run_warmup(order, "do:0", "fail")
    assert count_begun(order)["do:0"] == 2


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
    before, plan = first.identity, find_journal(order, [first]).path
    assert plan != find_journal(WarmupOrder(order.settings.but(precision="strict")), [first]).path
    file.write_text("a = 2")
    assert first.identity != before
    assert WarmupTask("t", "[1]").identity != WarmupTask("t").identity


def test_a_journal_that_cannot_be_written_is_told_once_and_nothing_else_is_lost(
    order: WarmupOrder,
) -> None:
    (order.settings.cache_dir / "warmup").write_text("a file where the folder should be")
    report = run_warmup(order, "do:0", "do2:0", "fail")
    assert [answer.is_finished for answer in report.answers] == [True, True, False]
    (problem,) = report.problems
    assert "cannot be written" in problem


def test_a_torn_line_does_not_swallow_the_next(order: WarmupOrder) -> None:
    run_warmup(order, "do:0", "fail")
    (path,) = list_journals(order)
    path.write_bytes(b'{"torn": ')
    run_warmup(order, "do:0", "fail")
    assert [json.loads(line)["answer"]["target"] for line in path.read_text().splitlines()[1:]] == [
        "do:0"
    ]
