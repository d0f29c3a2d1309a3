"""The products' benchmark: without a GPU every candidate is a row that says so; what hangs or dies
costs itself only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_gemm, gemm_cases, report
from benchmarks.gemm_cases import CASES, GemmCase
from torch_cudal1.ir.check import check_program
from torch_cudal1.kernels import propose

SMALL = GemmCase("small", 32, 48, 40, layout="nt")


def test_every_case_is_a_product_that_something_is_proposed_for() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        check_program(case.program())
        assert propose(case.program(), 90, ("matmul",)), case


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        GemmCase("batch", 8, 9, 10, batch=2, layout="tn"),
        GemmCase("tail", 8, 9, 10, tail="bias+gelu", dtype="bfloat16"),
    ],
)
def test_inputs_have_the_specs_of_the_program_and_pytorch_runs_the_same(case: GemmCase) -> None:
    from torch_cudal1.runtime.executor import prepare

    inputs = case.inputs("cpu")
    assert [tuple(t.stride()) for t in inputs] == [spec.strides for spec in case.specs("cpu")]
    (ours,) = prepare(case.program("cpu"), torch.device("cpu"))(list(inputs))
    assert ours is not None
    assert torch.equal(ours, case.run(inputs))


def test_a_wrong_result_is_told_with_its_place() -> None:
    measurer = bench_gemm.GemmMeasurer(torch.device("cpu"))
    measurer.start(SMALL)
    right = SMALL.run(measurer.inputs)
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


def test_a_process_that_dies_or_hangs_is_replaced_and_its_candidate_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "served.py"
    script.write_text(
        "import sys, time, json, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "done = (folder / 'journal').read_text() if (folder / 'journal').exists() else ''\n"
        "if 'dies' not in done: print('start case / dies now', flush=True); sys.exit(3)\n"
        "if 'hangs' not in done: print('start case / sleeps now', flush=True); time.sleep(60)\n"
    )
    plain = bench_gemm.subprocess.Popen
    monkeypatch.setattr(
        bench_gemm.subprocess,
        "Popen",
        lambda command, **how: plain([sys.executable, str(script), str(tmp_path)], **how),
    )
    monkeypatch.setattr(bench_gemm, "_SILENT_S", 1.0)
    bench_gemm.supervise(tmp_path, 60.0)
    rows = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [(row["name"], row["method"], row["failed"][:13]) for row in rows] == [
        ("case / dies now", "dies", "exit status 3"),
        ("case / sleeps now", "sleeps", "hangs"),
    ]
