"""The products' benchmark: without a GPU every candidate is a row that says so; what hangs or dies
costs itself only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_gemm, gemm_cases, report
from tests.benchmarks.test_gemm_cases import SMALL


def test_a_wrong_result_is_reported_with_its_place() -> None:
    measurer = bench_gemm.GemmMeasurer(torch.device("cpu"))
    measurer.start(SMALL)
    (right,) = SMALL.run(measurer.inputs)
    assert (measurer.errors(right)["wrong"], measurer.errors(right)["special"]) == (0, True)
    wrong = right.clone()
    wrong[3, 7] += 1
    assert measurer.errors(wrong)["first wrong"][0][:2] == [3, 7]
    wrong[4, 4] = float("nan")
    assert not measurer.errors(wrong)["special"]


def test_without_a_gpu_candidates_are_rows_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("asks for a machine without a GPU")
    monkeypatch.setattr(bench_gemm, "CASES", (SMALL,))
    monkeypatch.setattr(gemm_cases, "CASES", (SMALL,))
    out = tmp_path / "gemm.json"
    arguments = [
        "--processes",
        "1",
        "--per-case",
        "1",
        "--method",
        "tf32x3",
        "--budget-s",
        "60",
        "--out",
        str(out),
    ]
    assert bench_gemm.main(arguments) == 1
    document = report.load(out)
    assert [row["name"] for row in document["rows"]][:2] == [
        "small / cublas fp32",
        "small / cublas tf32",
    ]
    (candidate,) = document["rows"][2:]
    assert "driver" in candidate["failed"]
    assert "driver" in capsys.readouterr().out
