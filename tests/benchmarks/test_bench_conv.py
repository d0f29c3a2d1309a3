"""The convolutions' benchmark: cases are what they say, every one has a proposal, and without a GPU
rows tell so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_conv, report
from benchmarks.bench_conv import CASES, ConvCase, ConvMeasurer
from torch_cudal1.ir.check import check_program
from torch_cudal1.kernels import propose

SMALL = ConvCase("small", (2, 8, 9, 16), (8, 8, 3, 3), padding=(1,))


def test_every_case_has_a_proposal_on_an_h200() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        check_program(case.program())
        assert propose(case.program(), 90, ("conv",), most=1), case


def test_a_row_has_the_error_against_float64_and_the_floor() -> None:
    measurer = ConvMeasurer(SMALL, torch.device("cpu"))
    right, wrong = measurer.eager(), measurer.row("wrong", lambda: 2 * SMALL.run(*measurer.inputs))
    assert right["rms"] < 1e-6
    assert wrong["rms"] == pytest.approx(1.0, rel=1e-3)
    assert right["floor_us"] == round(2 * 4 * 2 * 8 * 9 * 16 / 4.2e6, 1)


def test_what_does_not_compile_is_a_row_with_the_reason(tmp_path: Path) -> None:
    built = bench_conv.compile_proposal(SMALL, {"rows": 3}, 90, tmp_path / "program")
    assert (
        "depthwise"
        in ConvMeasurer(SMALL, torch.device("cpu")).candidate({"rows": 3}, built, 1.0)["failed"]
    )


def test_without_a_gpu_the_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("asks for a machine without a GPU")
    monkeypatch.setattr(bench_conv, "CASES", (SMALL,))
    out = tmp_path / "conv.json"
    assert bench_conv.main(["--processes", "1", "--per-case", "1", "--out", str(out)]) == 1
    assert report.load(out)["kind"] == "conv"
    assert [row["failed"] for row in json.loads(out.read_text())["rows"]] == [
        "no GPU to measure on"
    ]
