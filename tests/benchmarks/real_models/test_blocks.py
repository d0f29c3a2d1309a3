"""The benchmark of blocks: a row for each model, also for one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.real_models import blocks
from benchmarks.report import load
from tests.ir.stacks import ROWS, WIDTH, make_stack

SMALL = {"deep": make_stack(4), "shallow": nn.Linear(WIDTH, WIDTH).eval()}


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MODELS", dict.fromkeys((*SMALL, "broken")))

    def build(name: str, *_: object) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, str]]:
        return SMALL[name], (torch.randn(ROWS, WIDTH),), {}

    monkeypatch.setattr(blocks, "build_model", build)


def test_both_ways_are_compiled_run_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "blocks.json"
    assert blocks.main(["--models", "deep", "shallow", "--device", "cpu", "--out", str(out)]) == 0
    deep, shallow = load(out)["rows"]
    assert deep["blocks"] == [{"occurrences": 3, "steps": deep["blocks"][0]["steps"]}]
    assert deep["lost_fusions"] == 0
    assert deep["largest_difference"] < 1e-4
    for way in ("inductor", "regional"):
        assert deep[way]["compile_s"] > 0
        assert deep[way]["compiled_kernels"] > 0
    # One layer and both ends are fewer kernels than four layers.
    assert deep["regional"]["compiled_kernels"] < deep["inductor"]["compiled_kernels"]
    assert deep["speedup"]["low"] <= deep["speedup"]["value"] <= deep["speedup"]["high"]
    assert (shallow["blocks"], "speedup" in shallow) == ([], False)


def test_a_model_that_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    out = tmp_path / "blocks.json"
    arguments = ["--models", "broken", "shallow", "--device", "cpu", "--out", str(out)]
    assert blocks.main(arguments) == 1
    broken, shallow = load(out)["rows"]
    assert broken["failed"].startswith("KeyError")
    assert shallow["distinct_share"] == 1.0
