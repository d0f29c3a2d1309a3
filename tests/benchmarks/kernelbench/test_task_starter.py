"""A task's process gets its files, its caches and one end of the pipe; its output goes to a log."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kernelbench import task_starter
from benchmarks.kernelbench.job import PROFILES, Job
from benchmarks.kernelbench.processes import kill_tree
from benchmarks.kernelbench.task_channel import receive
from benchmarks.kernelbench.task_runs import PendingTask, PoolPlan
from benchmarks.kernelbench.task_starter import TaskStarter
from benchmarks.kernelbench.tasks import Task
from benchmarks.kernelbench.template import NoTemplate

COMMAND = (sys.executable, "-m", "tests.benchmarks.kernelbench.scripted")
JOB = Job("cpu", PROFILES["quick"], arms=("only kernels",))
# prints, and answers with its environment and its specification
SOURCE = """
print("printed", flush=True)
names = ("TRITON_CACHE_DIR", "OMP_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK")
line.row({"environment": {name: os.environ[name] for name in names}, "spec": spec})
"""


def make_plan(folder: Path) -> PoolPlan:
    return PoolPlan(folder, 1, 3, memory_bytes=100, budget_s=60.0, command=COMMAND)


def start_and_receive(folder: Path, plan: PoolPlan, lost: Mapping[str, str]) -> dict[str, object]:
    starter = TaskStarter(JOB, plan, {"1/7": "code"})
    run = starter.start(PendingTask(Task(1, 7, "T", SOURCE, "today"), lost=lost))
    try:
        row = receive(run.connection)["row"]
        assert run.process.wait(60.0) == 0
    finally:
        kill_tree(run.process)
        run.connection.close()
        starter.close()
    assert run.log.read_text() == "printed\n"
    assert run.lost == lost
    return dict(row)


def test_a_task_has_its_specification_without_the_columns_that_it_lost(tmp_path: Path) -> None:
    row = start_and_receive(tmp_path, make_plan(tmp_path), {"only kernels": "died"})
    spec = row["spec"]
    assert isinstance(spec, dict)
    assert Job.from_json(spec["job"]) == JOB.withdraw({"only kernels"})
    assert (spec["candidate"], spec["threads"], spec["source"]) == ("code", 3, SOURCE)
    assert spec == json.loads((tmp_path / "tasks" / "level1_7.json").read_text())


def test_compilers_write_into_the_folder_of_work(tmp_path: Path) -> None:
    assert start_and_receive(tmp_path, make_plan(tmp_path), {})["environment"] == {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "OMP_NUM_THREADS": "3",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def test_a_template_that_ends_is_replaced_by_starts_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []

    class EndedTemplate:
        def __init__(self, *arguments: object) -> None: ...
        def start(self, *arguments: object) -> object:
            raise NoTemplate("the process that forks is gone or hangs")

        def close(self) -> None:
            closed.append("template")

    monkeypatch.setattr(task_starter, "Template", EndedTemplate)
    plan = replace(make_plan(tmp_path), fork=True)
    assert start_and_receive(tmp_path, plan, {})["spec"]
    assert closed == ["template"]
    assert "no more forks: the process that forks is gone" in capsys.readouterr().out
