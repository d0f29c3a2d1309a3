"""Many tasks at once: what one of them does costs it alone, memory is rationed, and who measures is
alone.

The processes are real, their work is scripted (`scripted`): they speak the line of a task's process
and need no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernelbench.job import PROFILES, Job
from benchmarks.kernelbench.task_pool import NothingRunsError, TaskPool
from benchmarks.kernelbench.task_runs import PoolPlan, Result
from benchmarks.kernelbench.tasks import Task

JOB = Job("cpu", replace(PROFILES["quick"], limit_s=20.0))
GOOD = "line.row(row(eager='ok', cudal1='ok'))"


def make_task(number: int, source: str) -> Task:
    return Task(1, number, f"T{number}", source, "today")


def make_plan(folder: Path, **changes: Any) -> PoolPlan:
    command = (sys.executable, "-m", "tests.benchmarks.kernelbench.scripted")
    return replace(
        PoolPlan(
            folder,
            workers=3,
            threads=1,
            memory_bytes=100,
            budget_s=60.0,
            reserve_s=0.0,
            command=command,
        ),
        **changes,
    )


def run_tasks(
    folder: Path, *sources: str, job: Job = JOB, **changes: Any
) -> tuple[dict[str, Mapping[str, Any]], int]:
    """Rows by key, and how many tasks are left."""
    results: list[Result] = []
    remaining = TaskPool(job, make_plan(folder, **changes), {}, results.append).run(
        [make_task(n, source) for n, source in enumerate(sources, 1)]
    )
    assert len({result.task.key for result in results}) == len(results)
    return {result.task.key: result.row for result in results}, remaining


def get_statuses(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: column["status"] for name, column in row["columns"].items()}


def read_notes(folder: Path) -> list[tuple[float, str]]:
    lines = (folder / "notes").read_text().splitlines()
    return [(float(line.split()[0]), line.split(maxsplit=1)[1]) for line in lines]


def test_a_task_that_crashes_or_exits_costs_itself_and_its_failure_is_counted(
    tmp_path: Path,
) -> None:
    crash = "line.stage('load')\nos.kill(os.getpid(), 11)"
    leave = "line.stage('load')\nprint('no such operator', flush=True)\nos._exit(3)"
    rows, remaining = run_tasks(tmp_path, crash, GOOD, leave)
    assert remaining == 0
    assert get_statuses(rows["1/2"]) == {"eager": "ok", "cudal1": "ok"}
    assert get_statuses(rows["1/1"]) == {
        "eager": "failed",
        "torch.compile": "failed",
        "cudal1": "failed",
    }
    assert "code -11 in 'load'" in rows["1/1"]["columns"]["cudal1"]["reason"]
    assert "code 3 in 'load': no such operator" in rows["1/3"]["columns"]["eager"]["reason"]


def test_a_task_that_hangs_in_the_package_is_ended_and_its_baselines_are_measured_without_it(
    tmp_path: Path,
) -> None:
    hang = "line.stage('tune: judging')\nif spec['job']['ours']: time.sleep(600)\nline.row(row(eager='ok'))"
    begin = time.monotonic()
    rows, _ = run_tasks(tmp_path, hang, job=replace(JOB, profile=replace(JOB.profile, limit_s=4.0)))
    assert time.monotonic() - begin < 60
    assert get_statuses(rows["1/1"]) == {"eager": "ok", "cudal1": "failed"}
    assert "time limit of 4 s in 'tune: judging'" in rows["1/1"]["columns"]["cudal1"]["reason"]


def test_a_task_whose_time_is_up_says_where_it_was(tmp_path: Path) -> None:
    hang = (
        "import faulthandler, signal; faulthandler.register(signal.SIGUSR1, all_threads=False)\n"
        "def waits():\n    time.sleep(600)\n"
        "line.stage('tune: judging')\nif spec['job']['ours']: waits()\nline.row(row(eager='ok'))"
    )
    rows, _ = run_tasks(tmp_path, hang, job=replace(JOB, profile=replace(JOB.profile, limit_s=4.0)))
    reason = rows["1/1"]["columns"]["cudal1"]["reason"]
    assert reason.startswith("time limit of 4 s in 'tune: judging', at ")
    assert reason.endswith(" in waits")


def test_one_column_that_kills_its_process_costs_the_others_nothing(tmp_path: Path) -> None:
    source = (
        "note(' '.join(spec['job']['arms']) + f\" ours={spec['job']['ours']}\")\n"
        "if 'only kernels' in spec['job']['arms']: line.stage('tune', 'only kernels'); os._exit(9)\n"
        "line.row({**row(eager='ok', cudal1='ok')})"
    )
    rows, _ = run_tasks(tmp_path, source, job=replace(JOB, arms=("only kernels", "only graphs")))
    assert [text for _, text in read_notes(tmp_path)] == [
        "only kernels only graphs ours=True",
        "only graphs ours=True",
    ]
    assert get_statuses(rows["1/1"]) == {"eager": "ok", "cudal1": "ok", "only kernels": "failed"}
    assert "code 9 in 'tune'" in rows["1/1"]["columns"]["only kernels"]["reason"]


def test_a_baseline_that_kills_the_process_costs_the_contenders_nothing(tmp_path: Path) -> None:
    source = (
        "left_out = spec['job'].get('left_out', [])\n"
        "note(f\"{left_out} ours={spec['job']['ours']}\"); line.stage('measure')\n"
        "if 'reduce-overhead' not in left_out: os.kill(os.getpid(), 11)\n"
        "line.row({**row(eager='ok', cudal1='ok')})"
    )
    rows, remaining = run_tasks(tmp_path, source, job=replace(JOB, device="cuda:0"))
    assert [text for _, text in read_notes(tmp_path)] == [
        "[] ours=True",
        "[] ours=False",
        "['reduce-overhead'] ours=True",
    ]
    assert (remaining, get_statuses(rows["1/1"])) == (
        0,
        {"eager": "ok", "cudal1": "ok", "reduce-overhead": "failed"},
    )
    assert "code -11 in 'measure'" in rows["1/1"]["columns"]["reduce-overhead"]["reason"]


def test_a_task_that_dies_without_that_baseline_too_is_tried_no_fifth_time(tmp_path: Path) -> None:
    source = "note('here'); line.stage('measure'); os.kill(os.getpid(), 11)"
    rows, remaining = run_tasks(tmp_path, source, job=replace(JOB, device="cuda:0"))
    assert (remaining, len(read_notes(tmp_path))) == (0, 4)
    assert set(get_statuses(rows["1/1"]).values()) == {"failed"}


def test_a_task_without_memory_is_tried_once_more_with_the_gpu_to_itself(tmp_path: Path) -> None:
    short = (
        "note('short'); line.memory(10)\n"
        "if len(open(folder / 'notes').read().split('short')) < 3: raise MemoryError('CUDA out of memory')\n"
        "line.row(row(eager='ok', cudal1='ok'))"
    )
    busy = "note('busy'); line.memory(10); time.sleep(1); note('busy ends'); line.row(row(eager='ok', cudal1='ok'))"
    rows, remaining = run_tasks(tmp_path, short, busy)
    assert (remaining, get_statuses(rows["1/1"])) == (0, {"eager": "ok", "cudal1": "ok"})
    assert (rows["1/1"]["alone"], rows["1/2"]["alone"]) == (True, False)
    order = [text for _, text in read_notes(tmp_path)]
    # the second try waited for everybody else
    assert order.index("busy ends") < len(order) - 1 - order[::-1].index("short")


def test_a_process_that_ended_for_lack_of_memory_is_recognised_by_its_log(tmp_path: Path) -> None:
    """What ends it need not be the last line that it writes."""
    short = (
        "note('short')\n"
        "if len(open(folder / 'notes').read().split('short')) < 3:\n"
        "    print('CUDA error: out of memory'); print('Compile with TORCH_USE_CUDA_DSA', flush=True); os._exit(1)\n"
        + GOOD
    )
    rows, remaining = run_tasks(tmp_path, short)
    assert remaining == 0
    assert rows["1/1"]["columns"]["cudal1"]["status"] == "ok"
    assert rows["1/1"]["alone"]


def test_a_task_that_is_short_of_memory_alone_too_is_a_failure(tmp_path: Path) -> None:
    rows, remaining = run_tasks(
        tmp_path, "line.stage('load'); line.memory(10); raise MemoryError('CUDA out of memory')"
    )
    assert (remaining, set(get_statuses(rows["1/1"]).values())) == (0, {"failed"})


def test_two_tasks_that_do_not_fit_together_are_never_on_the_gpu_at_once(tmp_path: Path) -> None:
    large = "line.memory(60); note('in'); time.sleep(0.3); note('out'); line.memory(0); " + GOOD
    run_tasks(tmp_path, large, large, large)
    assert [text for _, text in read_notes(tmp_path)] == ["in", "out"] * 3


def test_tasks_that_wait_for_memory_leave_processes_to_small_ones(tmp_path: Path) -> None:
    holds = "line.memory(90)\nwhile not (folder / 'go').exists(): time.sleep(0.01)\n" + GOOD
    waits = "line.memory(90); " + GOOD
    small = "line.memory(5); (folder / 'go').touch(); " + GOOD
    rows, remaining = run_tasks(tmp_path, holds, waits, small, workers=2, budget_s=30.0)
    assert (sorted(rows), remaining) == (["1/1", "1/2", "1/3"], 0)


def test_more_large_tasks_than_may_wait_are_set_aside_before_they_did_anything(
    tmp_path: Path,
) -> None:
    """The first takes the memory until the small one has run, which comes last and finds a seat all
    the same.
    """
    until = "while not (folder / {!r}).exists(): time.sleep(0.01)\n".format
    holds = "line.stage('load'); line.memory(60); (folder / 'held').touch()\n" + until("go") + GOOD
    large = (
        "note('load'); line.stage('load')\n"
        + until("held")
        + "line.memory(60); note('large'); "
        + GOOD
    )
    small = "line.stage('load'); line.memory(5); note('small'); (folder / 'go').touch(); " + GOOD
    rows, remaining = run_tasks(tmp_path, holds, *[large] * 5, small, workers=2, budget_s=30.0)
    assert (len(rows), remaining) == (7, 0)
    assert all(
        set(get_statuses(row).values()) <= {"ok", "failed"} and get_statuses(row)["cudal1"] == "ok"
        for row in rows.values()
    )
    order = [name for _, name in read_notes(tmp_path)]
    assert order.index("small") < order.index("large")
    assert order.count("large") == 5
    assert order.count("load") > 5


def test_an_enormous_task_waits_for_large_ones_and_has_small_ones_beside_it(tmp_path: Path) -> None:
    unknown = "line.memory(None); note('unknown'); time.sleep(0.3); note('unknown ends'); " + GOOD
    enormous = (
        "line.memory(10 ** 15); note('enormous')\nwhile not (folder / 'go').exists(): time.sleep(0.01)\n"
        + GOOD
    )
    small = (
        "line.memory(5); time.sleep(0.6); line.memory(5); note('small'); (folder / 'go').touch(); "
        + GOOD
    )
    rows, remaining = run_tasks(tmp_path, unknown, enormous, small)
    assert (len(rows), remaining) == (3, 0)
    order = [name for _, name in read_notes(tmp_path)]
    assert order.index("unknown ends") < order.index("enormous") or order.index(
        "enormous"
    ) < order.index("unknown")
    assert "small" in order


def test_what_a_waiting_task_holds_is_granted_to_no_other(tmp_path: Path) -> None:
    """Of 100: the one that waits keeps 30, so a second one of 60 cannot run beside the first of 30,
    though 60 and 30 would fit.
    """
    until = "while not (folder / {!r}).exists(): time.sleep(0.01)\n".format
    first = (
        "line.memory(30); note('first'); (folder / 'first').touch(); time.sleep(1); note('first ends'); "
        + GOOD
    )
    keeps = until("first") + "line.memory(90, 30); note('keeps'); " + GOOD
    other = until("first") + "time.sleep(0.3); line.memory(60); note('other'); " + GOOD
    rows, remaining = run_tasks(tmp_path, first, keeps, other)
    assert (len(rows), remaining) == (3, 0)
    order = [name for _, name in read_notes(tmp_path)]
    assert order.index("first ends") < min(order.index("keeps"), order.index("other"))


def test_large_tasks_have_what_no_small_one_wants(tmp_path: Path) -> None:
    large = "line.memory(45); note('in'); time.sleep(0.5); note('out'); " + GOOD
    run_tasks(tmp_path, large, large)
    assert sorted(text for _, text in read_notes(tmp_path)[:2]) == ["in", "in"]


@pytest.mark.parametrize("freeze", [True, False])
def test_while_one_measures_the_others_stand_still_with_all_their_children(
    tmp_path: Path, freeze: bool
) -> None:
    child = "import time\\nwhile True: open({path!r}, 'a').write('x'); time.sleep(0.01)"
    busy = (
        "import subprocess, sys\n"
        f"path = str(folder / 'beats')\nchild = \"{child}\".format(path=path)\n"
        "process = subprocess.Popen([sys.executable, '-c', child], start_new_session=True)\n"
        "while not (folder / 'done').exists(): time.sleep(0.01)\nprocess.kill()\n" + GOOD
    )
    measures = (
        "path = folder / 'beats'\nwhile not path.exists() or path.stat().st_size < 5: time.sleep(0.01)\n"
        "with line.quiet():\n    before = path.stat().st_size; time.sleep(0.5); beats = path.stat().st_size - before\n"
        "after = path.stat().st_size\n"
        "until = time.monotonic() + 20\nwhile path.stat().st_size <= after and time.monotonic() < until: time.sleep(0.01)\n"
        "note(f'{beats} beats, goes on: {path.stat().st_size > after}'); (folder / 'done').touch(); "
        + GOOD
    )
    run_tasks(tmp_path, busy, measures, freeze=freeze)
    ((_, note),) = read_notes(tmp_path)
    assert note.endswith("goes on: True")
    assert note.startswith("0 beats") == freeze


def test_only_one_task_measures_at_a_time_and_its_death_sets_the_others_free(
    tmp_path: Path,
) -> None:
    dies = "line.stage('compile')\nwith line.quiet(): os._exit(1)"
    measures = "with line.quiet():\n    note('in'); time.sleep(0.2); note('out')\n" + GOOD
    rows, remaining = run_tasks(tmp_path, dies, measures, measures)
    assert (len(rows), remaining) == (3, 0)
    assert [text for _, text in read_notes(tmp_path)] == ["in", "out"] * 2


def test_time_that_a_task_stood_still_or_waited_counts_for_no_limit(tmp_path: Path) -> None:
    measures = "with line.quiet(): time.sleep(2.5)\n" + GOOD
    waits = "line.memory(100); time.sleep(0.5); " + GOOD
    job = replace(JOB, profile=replace(JOB.profile, limit_s=6.5))
    rows, _ = run_tasks(tmp_path, waits, measures, measures, measures, workers=4, job=job)
    assert all(set(get_statuses(row).values()) == {"ok"} for row in rows.values())
    assert all(row["wall_s"] < 6.5 for row in rows.values())


def test_what_does_not_fit_into_the_budget_is_left_for_the_next_call_and_no_process_stays(
    tmp_path: Path,
) -> None:
    forever = "open(folder / 'pid', 'w').write(str(os.getpid())); time.sleep(600)"
    begin = time.monotonic()
    rows, remaining = run_tasks(tmp_path, GOOD, forever, forever, budget_s=5.0)
    assert time.monotonic() - begin < 30
    assert (list(rows), remaining) == (["1/1"], 2)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_nothing_is_started_that_cannot_end_in_time(tmp_path: Path) -> None:
    rows, remaining = run_tasks(tmp_path, GOOD, budget_s=5.0, reserve_s=10.0)
    assert (rows, remaining) == ({}, 1)


def test_where_nothing_runs_at_all_the_run_ends_early_and_keeps_no_row(tmp_path: Path) -> None:
    broken = "line.stage('load'); print('libcuda is missing', flush=True); os._exit(1)"
    results: list[Result] = []
    with pytest.raises(NothingRunsError, match=r"first 6 tasks failed whole.*libcuda is missing"):
        TaskPool(JOB, make_plan(tmp_path), {}, results.append).run(
            [make_task(n, broken) for n in range(1, 20)]
        )
    assert results == []
