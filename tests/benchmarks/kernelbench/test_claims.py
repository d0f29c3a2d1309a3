"""Runs side by side share the tasks: each is done by one of them, also where another one was
killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.kernelbench.claims import Claims, order_tasks
from benchmarks.kernelbench.tasks import Task
from tests.benchmarks.kernelbench.test_task_pool import GOOD, make_task, run_tasks

_OTHER = """
import sys
from pathlib import Path
from benchmarks.kernelbench.claims import Claims
from benchmarks.kernelbench.tasks import Task
print(Claims(Path(sys.argv[1])).take(Task(1, 1, "T1", sys.argv[2], "today")), flush=True)
sys.stdin.read()
"""


def test_a_task_is_taken_once_while_its_taker_lives(tmp_path: Path) -> None:
    claims, first_task = Claims(tmp_path), make_task(1, GOOD)
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(tmp_path), GOOD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "True\n"
    assert not claims.take(first_task)
    assert claims.take(make_task(2, GOOD))
    other.stdin.close()
    other.wait()
    other.stdout.close()
    assert claims.take(first_task)
    claims.release(first_task)
    assert [path.suffix for path in tmp_path.iterdir()] == [".claim"]


def test_what_another_run_has_taken_is_neither_done_nor_left(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    assert claims.take(make_task(1, GOOD))
    (claim,) = claims.folder.iterdir()
    claim.write_text(str(os.getppid()))  # which lives
    rows, remaining = run_tasks(tmp_path, GOOD, GOOD, claims=claims)
    assert (sorted(rows), remaining) == (["1/2"], 0)


def test_a_task_that_is_tried_again_is_still_this_runs(tmp_path: Path) -> None:
    dies = "line.stage('tune')\nif spec['job']['ours']: os._exit(9)\nline.row(row(eager='ok'))"
    rows, remaining = run_tasks(tmp_path, dies, claims=Claims(tmp_path / "claims"))
    assert (
        remaining,
        rows["1/1"]["columns"]["eager"]["status"],
        rows["1/1"]["columns"]["cudal1"]["status"],
    ) == (0, "ok", "failed")


def test_what_a_run_did_not_finish_is_free_again(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    rows, remaining = run_tasks(
        tmp_path, "(folder / 'began').touch(); time.sleep(600)", claims=claims, budget_s=4.0
    )
    assert (rows, remaining) == ({}, 1)
    assert list((tmp_path / "claims").iterdir()) == []


def test_every_run_deals_all_tasks_in_one_order_with_the_levels_mixed() -> None:
    tasks = [
        Task(level, number, "T", f"{level} {number}", "today")
        for level in (1, 2, 3)
        for number in range(20)
    ]
    order = order_tasks(tasks)
    assert order == order_tasks(tasks[::-1])
    assert {task.key for task in order} == {task.key for task in tasks}
    assert all(task.level == 3 or index for index, task in enumerate(order) if task.level == 3)
    assert max(index for index, task in enumerate(order) if task.level == 3) < max(
        index for index, task in enumerate(order)
    )
    assert len({task.level for task in order[:15]}) == 3
