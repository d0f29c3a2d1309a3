"""Tasks' processes are forked from one that has imported everything; where that does not work they
are started from nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernelbench import task_starter
from benchmarks.kernelbench.job import PROFILES, Job
from benchmarks.kernelbench.task_pool import TaskPool
from benchmarks.kernelbench.task_runs import PoolPlan, Result
from benchmarks.kernelbench.template import NoTemplate, Template
from tests.benchmarks.kernelbench.examples import DIAGONAL
from tests.benchmarks.kernelbench.test_task_pool import make_task

ROOT = Path(__file__).resolve().parents[3]
JOB = Job("cpu", PROFILES["fast"], ours=False)
SMALL = DIAGONAL.replace("512", "64").replace("256", "64")


def run_tasks(folder: Path, *sources: str) -> list[Result]:
    results: list[Result] = []
    plan = PoolPlan(
        folder, workers=1, threads=1, memory_bytes=1 << 40, budget_s=300.0, reserve_s=0.0, fork=True
    )
    assert (
        TaskPool(JOB, plan, {}, results.append).run(
            [make_task(number, source) for number, source in enumerate(sources, 1)]
        )
        == 0
    )
    return sorted(results, key=lambda result: result.task.number)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands that were started from nothing by the run itself."""
    commands: list[Any] = []
    popen = subprocess.Popen

    def start(command: Any, *args: Any, **kwargs: Any) -> Any:
        commands.append(command)
        return popen(command, *args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # what Inductor compiles is not what is tested
    return commands


def test_forked_tasks_answer_crash_and_exit_as_started_ones_do(
    tmp_path: Path, started: list[Any]
) -> None:
    crash, leave, fail = (
        "import os\nos.kill(os.getpid(), 11)",
        "import os\nprint('gone', flush=True)\nos._exit(3)",
        "raise OSError('no file')",
    )
    good, crashed, exited, failed = run_tasks(tmp_path, SMALL, crash, leave, fail)
    assert {name: result["status"] for name, result in good.row["columns"].items()} == {
        "eager": "ok",
        "torch.compile": "ok",
    }
    reasons = [result.row["columns"]["eager"]["reason"] for result in (crashed, exited, failed)]
    assert "code -11 in 'load'" in reasons[0]
    assert "code 3 in 'load': gone" in reasons[1]
    assert "code 1 in 'load': OSError: no file" in reasons[2]
    assert [command for command in started if "benchmarks.kernelbench.child" in command] == []


def test_without_a_template_every_task_is_started_from_nothing(
    tmp_path: Path,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def none(*arguments: object) -> Template:
        raise NoTemplate("a forked process cannot calculate on cuda:0")

    monkeypatch.setattr(task_starter, "Template", none)
    (good,) = run_tasks(tmp_path, SMALL)
    assert good.row["columns"]["eager"]["status"] == "ok"
    assert len([command for command in started if "benchmarks.kernelbench.child" in command]) == 1
    assert "started from nothing: a forked process cannot" in capsys.readouterr().out


def test_a_template_that_cannot_use_the_device_says_so_and_ends_with_its_children(
    tmp_path: Path,
) -> None:
    with pytest.raises(NoTemplate, match="cannot calculate on meta"):
        Template("meta", dict(os.environ), ROOT, tmp_path / "log")
    template = Template("cpu", dict(os.environ), ROOT, tmp_path / "log")
    connection, child_end = Pipe()
    spec = tmp_path / "spec.json"
    with (tmp_path / "task.log").open("wb") as log:
        forked = template.start(spec, child_end.fileno(), log)  # there is no such file
    assert forked.wait(60.0) == 1
    assert "FileNotFoundError" in (tmp_path / "task.log").read_text()
    os.kill(template._process.pid, signal.SIGKILL)
    with pytest.raises(NoTemplate, match="gone or hangs"):
        template.start(spec, child_end.fileno(), (tmp_path / "log").open("rb"))
    assert template.status(1) == -signal.SIGKILL
    template.close()
    connection.close()
    child_end.close()
