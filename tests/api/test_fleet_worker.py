"""The real worker: answers from a warm cache as this process would, keeps a target's prints away,
and ends with its parent.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import torch

from tests.entries import plant
from torch_cudal1.api.fleet import local
from torch_cudal1.api.fleet.fleet_worker import run_task
from torch_cudal1.api.fleet.local import LocalPool, list_cpu_slots
from torch_cudal1.api.fleet.pool import run_tasks
from torch_cudal1.api.fleet.warmup_journal import find_journal
from torch_cudal1.api.fleet.warmup_task import (
    WarmupAnswer,
    WarmupOrder,
    WarmupTask,
    encode_signature,
)
from torch_cudal1.api.recording.recorder import compute_module_identity
from torch_cudal1.api.targets import load
from torch_cudal1.core.call_signature import describe
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.recording_file import CallRecord, Mode

SOURCE = """\
import os, time, torch
print("a target may print")
def make(): return torch.nn.Linear(3, 2).eval(), (torch.ones(4, 3),)
def other(): return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()).eval(), (torch.ones(4, 3),)
def bad(): raise ValueError("no such checkpoint")
def hangs():
    print("hanging", flush=True)
    time.sleep(600)
"""


def plant_target(tmp_path: Path) -> tuple[Path, WarmupOrder]:
    """A target file, and an order whose cache has the decisions for `make` and `other`."""
    file = tmp_path / "model.py"
    file.write_text(SOURCE)
    for name in ("make", "other"):
        (loaded,) = load(f"{file}:{name}")
        with torch.no_grad():
            plant(loaded.module, loaded.inputs, tmp_path / "cache")
    return file, WarmupOrder(Settings(cache_dir=tmp_path / "cache", budget_s=1.0))


def comparable(answer: WarmupAnswer) -> tuple[object, ...]:
    assert answer.result is not None, answer
    return (
        answer.task,
        answer.result.explanation,
        answer.result.error,
        answer.result.built,
        answer.result.reused,
    )


def test_workers_answer_what_this_process_would(tmp_path: Path) -> None:
    file, order = plant_target(tmp_path)
    tasks = [WarmupTask(f"{file}:{name}") for name in ("make", "bad", "other")]
    here = [run_task(order, task, lambda activity, fraction: None) for task in tasks]
    pool = LocalPool(order, list_cpu_slots(1, sorted(os.sched_getaffinity(0))))
    there = run_tasks(
        tasks, pool, find_journal(order, tasks), lambda activity, fraction: None
    ).answers
    assert [comparable(answer) for answer in there if answer.result] == [
        comparable(answer) for answer in here if answer.result
    ]
    assert "no such checkpoint" in there[1].unusable
    assert there[1] == here[1]
    assert all(answer.result is None or answer.result.reused for answer in there), (
        "nothing was to be searched"
    )


def test_a_task_at_a_recorded_form_is_warmed_at_that_form(tmp_path: Path) -> None:
    file, order = plant_target(tmp_path)
    (loaded,) = load(f"{file}:make")
    with torch.no_grad():
        plant(loaded.module, (torch.ones(7, 3),), tmp_path / "cache")
    mode = Mode(grad=False, training=False)

    def make_signature(form: object) -> str:
        return encode_signature(
            CallRecord(
                "module",
                "Linear",
                compute_module_identity(loaded.module),
                canonical_json(form),
                mode,
                12,
            )
        )

    recorded = make_signature(describe(((torch.ones(7, 3),), {})))
    example, other = (
        run_task(order, WarmupTask(f"{file}:make", signature), lambda activity, fraction: None)
        for signature in ("", recorded)
    )
    assert example.keys != other.keys
    assert other.result is not None
    assert (other.result.error, other.result.reused) == (None, 1)
    for bad, reason in (
        (make_signature({"u": [{"u": [{"s": 0}]}, {"d": {}}]}), "cannot be made"),
        ("[", "no line of a recording"),
    ):
        assert (
            reason
            in run_task(
                order, WarmupTask(f"{file}:make", bad), lambda activity, fraction: None
            ).unusable
        )
    assert (
        "no call of"
        in run_task(
            order,
            WarmupTask(f"{file}:other", recorded.replace("Linear", "Conv")),
            lambda activity, fraction: None,
        ).unusable
    )


def test_a_worker_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    file, order = plant_target(tmp_path)
    reading, writing = os.pipe()
    log = tmp_path / "log"
    with open(log, "wb") as out:
        worker = subprocess.Popen(
            [*local._COMMAND, str(writing)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
        )
    os.close(writing)
    assert worker.stdin is not None
    with os.fdopen(reading) as answers:
        for line in (
            {"order": order.to_json(), "cores": sorted(os.sched_getaffinity(0))},
            {"target": f"{file}:hangs", "signature": ""},
        ):
            worker.stdin.write((json.dumps(line) + "\n").encode())
        worker.stdin.flush()
        assert json.loads(answers.readline()) == {"ready": True}
        while b"hanging" not in log.read_bytes():
            assert worker.poll() is None, log.read_text()
        worker.stdin.close()  # as when the parent is killed
        worker.wait(900)
    assert b"Traceback" not in log.read_bytes()
