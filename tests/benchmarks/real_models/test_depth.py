"""The benchmark of depth: which processes share caches, and what a row says."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import cudal1
from benchmarks.real_models import depth, own_process
from benchmarks.report import load

CPU = torch.device("cpu")


def run_main(out: Path, monkeypatch: pytest.MonkeyPatch, answer: Any) -> tuple[int, list[Any]]:
    """`main` with processes that answer with `answer(command)`: its exit code, and their commands and
    environments.
    """
    started: list[Any] = []

    def start(command: list[str], env: dict[str, str], **_: Any) -> Any:
        started.append((command, env))
        return answer(command)

    monkeypatch.setattr(own_process.subprocess, "run", start)
    # It starts programs too.
    monkeypatch.setattr(depth.report, "environment", dict)
    arguments = ["--out", str(out), "--depths", "2", "8", "--second", "5", "--width", "tiny"]
    return depth.main([*arguments, "--device", "cpu"]), started


def test_each_depth_has_its_own_caches_and_the_second_model_those_of_the_deepest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], 0, "a warning\n" + json.dumps({"seconds": 1.5}), "")
    code, started = run_main(tmp_path / "depth.json", monkeypatch, lambda _: done)
    assert code == 0
    caches = [command[command.index("--cache-dir") + 1] for command, _ in started]
    assert len(set(caches)) == 2
    assert caches[2] == caches[1]
    inductor = [environment["TORCHINDUCTOR_CACHE_DIR"] for _, environment in started]
    assert inductor[1] == inductor[2] != inductor[0]
    assert ["--no-head" in command for command, _ in started] == [False, False, True]
    rows = load(tmp_path / "depth.json")["rows"]
    assert [(row["layers"], row["has_head"], row["seconds"]) for row in rows] == [
        (2, True, 1.5),
        (8, True, 1.5),
        (5, False, 1.5),
    ]


def test_a_process_that_fails_or_hangs_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(command: list[str]) -> Any:
        if command[command.index("--one") + 1] == "2":
            return subprocess.CompletedProcess(
                command, 1, "", "Traceback\nMemoryError: too large\n"
            )
        raise subprocess.TimeoutExpired(command, 1.0)

    code, _ = run_main(tmp_path / "depth.json", monkeypatch, answer)
    assert code == 1
    reasons = [row["failed"] for row in load(tmp_path / "depth.json")["rows"]]
    assert reasons == ["MemoryError: too large", *["not ready in 300 s"] * 2]


@pytest.mark.parametrize("has_head", [True, False])
def test_a_row_says_what_was_decided_and_whether_it_is_right(
    has_head: bool, dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = cudal1.accelerate

    def accelerate_without_search(*args: Any, on_miss: str, **options: Any) -> Any:
        assert on_miss == "tune"
        return accelerate(*args, on_miss="baseline", **options)

    monkeypatch.setattr(cudal1, "accelerate", accelerate_without_search)
    args = argparse.Namespace(
        device="cpu",
        width="tiny",
        tokens=8,
        budget_s=1.0,
        cache_dir=tmp_path,
        no_head=not has_head,
    )
    row = depth.tune_model(2, args)
    assert row["difference"] == 0.0
    assert row["seconds"] > 0
    assert row["own_us"] > 0
    assert row["counters"]["regions_tuned"] == 0


def test_a_head_is_what_the_second_model_lacks() -> None:
    shapes = []
    for has_head in (True, False):
        module, arguments = depth.build_llama(1, "tiny", 4, has_head=has_head, device=CPU)
        with torch.no_grad():
            shapes.append(tuple(module(**arguments)[0].shape))
    assert shapes == [(1, 4, 128), (1, 4, 64)]
    assert torch.get_default_dtype() == torch.float32
