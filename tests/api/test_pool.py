"""Every task is answered in its place, none is done twice, and a dead worker costs its own task only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api import light
from tests.api.light_runs import count_begun, list_journals, plant_order, run_warmup
from torch_cudal1.api.fleet.warmup_task import WarmupOrder


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WarmupOrder:
    return plant_order(tmp_path, monkeypatch)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_answers_do_not_depend_on_the_number_of_workers(
    order: WarmupOrder, workers: int
) -> None:
    targets = [f"do{i}:{0.05 * (i % 3)}" for i in range(6)]
    report = run_warmup(order, *targets, targets[0], workers=workers)
    assert [answer.task.target for answer in report.answers] == targets
    assert all(answer.is_finished and answer.keys == (light.KEY,) for answer in report.answers)
    assert count_begun(order) == dict.fromkeys(targets, 1)
    assert report.problems == ()
    assert list_journals(order) == []


def test_a_dead_workers_task_is_done_once_more(order: WarmupOrder) -> None:
    report = run_warmup(order, "do:0", "die-once", "do2:0")
    assert all(answer.is_finished for answer in report.answers)
    assert count_begun(order) == {"do:0": 1, "die-once": 2, "do2:0": 1}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("die", "SIGKILL: this worker has"),
        ("half:0", "exit code 3"),
        ("garbage", "SIGKILL"),
        ("die-quietly", "worker 0 died"),
    ],
)
def test_a_task_that_kills_its_workers_is_reported_and_costs_no_other(
    order: WarmupOrder, target: str, reason: str
) -> None:
    if target == "garbage":
        reason = "worker 0 died"
    report = run_warmup(order, target, "do:0", "do2:0", workers=1)
    assert [answer.is_finished for answer in report.answers] == [False, True, True]
    assert reason in report.answers[0].died
    assert "segmentation fault of the driver" in report.answers[0].died or target != "die"
    assert count_begun(order)[target] == 2
    assert len(list_journals(order)) == 1


def test_a_target_that_cannot_be_used_is_not_tried_twice(order: WarmupOrder) -> None:
    report = run_warmup(order, "unusable", "do:0")
    assert report.answers[0].unusable == "no such callable"
    assert count_begun(order) == {"unusable": 1, "do:0": 1}


def test_progress_counts_tasks_of_all_workers_and_ends_at_the_whole(order: WarmupOrder) -> None:
    reports: list[tuple[str, float | None]] = []
    run_warmup(order, "do:0.05", "do2:0.05", "do3:0", reports=reports)
    fractions = [fraction for _, fraction in reports]
    assert all(fraction is not None for fraction in fractions)
    assert fractions == sorted(fractions, key=lambda fraction: fraction or 0.0)
    assert fractions[-1] == pytest.approx(1.0)
    assert reports[-1][0].startswith("3 of 3 tasks done, 0 running")
