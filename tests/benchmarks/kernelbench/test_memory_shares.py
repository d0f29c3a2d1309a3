"""Memory is rationed: large tasks wait for large ones, small ones find room beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernelbench.memory_shares import (
    has_enough_large_waiting,
    is_small,
    limit_request,
    size_grant,
)
from benchmarks.kernelbench.task_runs import TaskRun
from benchmarks.kernelbench.tasks import Task

MEMORY = 100
ABSENT: Any = None


def make_run(
    requested: int, *, granted: int = 0, waits: Any = "memory", alone: bool = False
) -> TaskRun:
    task = Task(1, 1, "T", "source", "today")
    run = TaskRun(task, ABSENT, ABSENT, Path("log"), alone, {}, 0.0)
    run.requested_bytes, run.granted_bytes, run.waits = requested, granted, waits
    return run


def make_working(size: int) -> TaskRun:
    return make_run(size, granted=size, waits="")


def test_a_task_of_a_twentieth_of_the_memory_is_small() -> None:
    assert is_small(5, MEMORY)
    assert not is_small(6, MEMORY)


@pytest.mark.parametrize(
    ("size", "alone", "limited"),
    [(30, False, 30), (10**15, False, 100), (None, False, 25), (30, True, 100)],
)
def test_a_request_is_limited_to_the_memory_and_guessed_where_it_is_unknown(
    size: int | None, alone: bool, limited: int
) -> None:
    assert limit_request(size, MEMORY, alone=alone) == limited


def test_two_large_tasks_may_wait_and_small_ones_do_not_count() -> None:
    waiting = [make_run(60), make_run(5), make_run(3)]
    assert not has_enough_large_waiting(waiting, MEMORY)
    assert has_enough_large_waiting([*waiting, make_run(40)], MEMORY)
    assert not has_enough_large_waiting([*waiting, make_run(40, alone=True)], MEMORY)


def test_a_large_task_leaves_the_share_of_a_small_one_free() -> None:
    large = make_run(100)
    assert size_grant(large, [large], MEMORY) == 95
    small = make_run(5)
    assert size_grant(small, [small, make_working(90)], MEMORY) == 5


def test_two_large_tasks_that_do_not_fit_together_wait_for_each_other() -> None:
    waiting = make_run(60)
    assert size_grant(waiting, [waiting, make_working(60)], MEMORY) is None
    assert size_grant(waiting, [waiting, make_working(30)], MEMORY) == 60


def test_what_a_waiting_task_holds_is_taken() -> None:
    waiting, holding = make_run(60), make_run(90, granted=30)
    assert size_grant(waiting, [waiting, holding, make_working(20)], MEMORY) is None
    assert size_grant(waiting, [waiting, holding], MEMORY) == 60


def test_a_task_that_runs_alone_has_all_memory() -> None:
    alone = make_run(100, alone=True)
    assert size_grant(alone, [alone], MEMORY) == 100
