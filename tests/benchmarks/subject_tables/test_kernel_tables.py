"""Tables of single kernels: a kernel without a time has its reason instead of a figure."""

from __future__ import annotations

from pathlib import Path

from benchmarks.subject_tables.kernel_tables import tabulate_kernels
from tests.benchmarks.subject_tables.documents import write_document


def test_a_family_has_its_gain_or_why_there_is_none(tmp_path: Path) -> None:
    ratio = {"speedup": 2.0, "low": 1.9, "high": 2.1}
    times = {"eager": 20.0, "torch.compile": 18.0, "kernel": 9.0}
    right = {
        "family": "softmax",
        "case": "rows",
        "status": "ok",
        "us": times,
        "error_ratio": 0.5,
        "reason": "",
    }
    rows = [
        {**right, "vs_better": ratio, "of_copy": ratio},
        {"family": "loss", "case": "hinge", "status": "failed", "reason": "a | b"},
    ]
    write_document(tmp_path / "h200-families.json", rows)
    lines = tabulate_kernels(tmp_path)
    assert "| softmax: rows | 20 | 18 | 9 | 2.000x [1.900, 2.100] | 2.00 | 0.50 |" in lines
    assert "| loss: hinge |  |  |  | failed: a / b | | |" in lines


def test_a_product_that_failed_is_a_line_and_pairs_have_a_table_of_their_own(
    tmp_path: Path,
) -> None:
    measured = {"name": "square / tf32", "device_us": 10.0, "tflops": 3.5, "rms": 1e-4}
    rows = [
        {**measured, "worst": 1e-3, "special": True, "wrong": 0},
        {"name": "square / broken", "failed": "compile: no registers"},
        {"name": "square / tf32", "final": True, "us": 11.0, "against": {}},
    ]
    write_document(tmp_path / "h200-gemm.json", rows)
    lines = tabulate_kernels(tmp_path)
    assert "| square / tf32 | 10.0 | 3.5 | 1.00e-04 | 1.00e-03 |" in lines
    assert "| square / broken | compile: no registers | | | |" in lines
    assert "| square / tf32 | 11.0 |  |  |" in lines


def test_a_convolution_shows_the_bound_of_its_memory_traffic_or_its_gain(tmp_path: Path) -> None:
    eager = {"case": "3x3", "name": "eager", "device_us": 40.0, "rms": 1e-5, "floor_us": 30.0}
    kernel = {"case": "3x3", "name": "rows=3", "device_us": 20.0, "rms": 1e-5, "speedup": 2.0}
    write_document(tmp_path / "h200-conv.json", [eager, kernel])
    lines = tabulate_kernels(tmp_path)
    assert "| 3x3 | eager | 40.0 | floor 30 µs | 1.0e-05 |" in lines
    assert "| 3x3 | rows=3 | 20.0 | 2.00x | 1.0e-05 |" in lines
