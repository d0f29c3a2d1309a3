"""Every case of the GEMM benchmark is a product that kernels are proposed for."""

from __future__ import annotations

import pytest
import torch

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
        GemmCase("siblings", 8, 9, 10, tail="bias", layout="nt", siblings=3),
        GemmCase("gate", 8, 9, 10, tail="bias+gate", layout="nt", siblings=2),
    ],
)
def test_inputs_have_the_specs_of_the_program_and_pytorch_runs_the_same(case: GemmCase) -> None:
    from torch_cudal1.runtime.executor import prepare

    inputs = case.inputs("cpu")
    assert [tuple(t.stride()) for t in inputs] == [spec.strides for spec in case.specs("cpu")]
    outputs = prepare(case.program("cpu"), torch.device("cpu"))(list(inputs))
    for got, expected in zip(outputs, case.run(inputs), strict=True):
        assert got is not None
        assert torch.equal(got, expected)
