"""The command line: a run that is killed goes on where it stopped; a real task goes all the way to
a report.
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.kernelbench import __main__ as command
from benchmarks.kernelbench import rows
from benchmarks.kernelbench.task_runs import PoolPlan
from tests.benchmarks.kernelbench.examples import DIAGONAL

SCRIPTED = (sys.executable, "-m", "tests.benchmarks.kernelbench.scripted")
_DRIVER = f"""
import functools, sys
from benchmarks.kernelbench import __main__ as command
command.PoolPlan = functools.partial(command.PoolPlan, command={SCRIPTED!r})
sys.exit(command.main(sys.argv[1:]))
"""
GOOD = "note(spec['job']['rights']); line.row(row(eager='ok', cudal1='ok'))"
STUCK = (
    "(folder / 'stuck').write_text(str(os.getpid()))\nwhile not (folder / 'go').exists(): time.sleep(0.01)\n"
    + GOOD
)


def write_checkout(folder: Path, *sources: str) -> Path:
    for number, source in enumerate(sources, 1):
        path = folder / "KernelBench" / "level1" / f"{number}_T.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


def make_options(tmp_path: Path, *more: str) -> list[str]:
    arguments = [
        "run",
        str(tmp_path),
        "--out",
        str(tmp_path / "rows.jsonl"),
        "--work",
        str(tmp_path / "work"),
        "--device",
        "cpu",
    ]
    return [*arguments, "--reserve-s", "0", "--workers", "2", "--no-fork", *more]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PoolPlan", functools.partial(PoolPlan, command=SCRIPTED))


def list_done_tasks(tmp_path: Path) -> list[str]:
    return [row["task"]["key"] for row in rows.read_rows(tmp_path / "rows.jsonl")]


def test_a_run_that_is_killed_leaves_no_process_and_the_next_one_goes_on(
    tmp_path: Path, scripted: None
) -> None:
    write_checkout(tmp_path, GOOD, STUCK)
    process = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, *make_options(tmp_path)], stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    pid = tmp_path / "work" / "stuck"
    while not (list_done_tasks(tmp_path) == ["1/1"] and pid.exists() and pid.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while Path(f"/proc/{pid.read_text()}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    (tmp_path / "work" / "go").touch()
    assert command.main(make_options(tmp_path)) == 0
    assert list_done_tasks(tmp_path) == ["1/1", "1/2"]
    # the first task was not done again
    assert len((tmp_path / "work" / "notes").read_text().splitlines()) == 2


def test_a_call_whose_budget_ends_first_says_that_there_is_more_to_do(
    tmp_path: Path, scripted: None
) -> None:
    write_checkout(tmp_path, GOOD)
    assert command.main(make_options(tmp_path, "--budget-s", "0")) == 3
    assert list_done_tasks(tmp_path) == []


def test_other_rights_are_another_job_in_the_same_file(tmp_path: Path, scripted: None) -> None:
    write_checkout(tmp_path, GOOD)
    assert [
        command.main(make_options(tmp_path, "--rights", rights))
        for rights in ("default", "tf32", "tf32")
    ] == [0, 0, 0]
    policies = [line.split()[1] for line in (tmp_path / "work" / "notes").read_text().splitlines()]
    assert policies == ["default", "tf32"]


def test_candidates_of_another_release_are_another_column(tmp_path: Path, scripted: None) -> None:
    write_checkout(tmp_path, GOOD)
    for name, code in (("a.json", "one"), ("b.json", "two")):
        line = {"level_id": 1, "task_id": "1", "ref_code": "r", "custom_code": code}
        (tmp_path / name).write_text(json.dumps(line))
        assert command.main(make_options(tmp_path, "--candidates", str(tmp_path / name))) == 0
    release_rows = rows.read_rows(tmp_path / "rows.jsonl")
    assert [row["job"]["judged"].split()[0] for row in release_rows] == ["a", "b"]


def test_wrong_usage_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(make_options(tmp_path)) == 2
    assert command.main(["report", str(tmp_path / "absent.jsonl")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [("expected a checkout" in errors[0]), ("expected a file made by" in errors[1])] == [
        True,
        True,
    ]
    with pytest.raises(SystemExit):
        command.main(make_options(tmp_path, "--shard", "4/4"))


def test_a_real_task_goes_from_its_file_to_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # what Inductor compiles is not what is tested, and takes most of a minute
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    small = DIAGONAL.replace("512", "64").replace("256", "64")
    write_checkout(tmp_path, small, "import os\nos._exit(7)")
    assert command.main(make_options(tmp_path, "--no-ours", "--limit-s", "120")) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["rows"], summary["left"]) == (2, 0)
    first, second = rows.read_rows(tmp_path / "rows.jsonl")
    assert {name: column["status"] for name, column in first["columns"].items()} == {
        "eager": "ok",
        "torch.compile": "ok",
    }
    assert first["against"]["torch.compile"]["eager"]["speedup"] > 0
    assert "code 7 in 'load'" in second["columns"]["eager"]["reason"]
    page, tables = tmp_path / "page.html", tmp_path / "tables.md"
    assert (
        command.main(
            ["report", str(tmp_path / "rows.jsonl"), "--html", str(page), "--markdown", str(tables)]
        )
        == 0
    )
    assert "| torch.compile |" in tables.read_text()
    assert page.read_text().startswith("<!DOCTYPE html>")
    home = str(Path.home())
    assert home not in (tmp_path / "rows.jsonl").read_text().replace(str(tmp_path), "")
