"""Epilogues of a product as C++, and what has no translation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.codegen.epilogue import list_values, print_cuda_epilogue
from torch_cudal1.kernels.registry import trace
from torch_cudal1.kernels.templates.gemm_tiled import read_parts

A, B, BIAS = torch.empty(32, 64), torch.empty(64, 48), torch.empty(48)


def nest_of(function):
    return read_parts(trace(trace_program(function, (A, B, BIAS)))).epilogue


def test_bias_and_activation_become_one_function() -> None:
    nest = nest_of(lambda a, b, bias: F.relu(a @ b + bias))
    assert list_values(nest)[0] == (2,)
    epilogue = print_cuda_epilogue(nest)
    assert epilogue.reads == (2,)
    assert epilogue.pairs
    assert "__ldg(p2 + " in epilogue.text
    assert "nan_max" in epilogue.text


def test_two_results_have_no_form_in_c() -> None:
    def both(a, b, bias):
        total = a @ b + bias
        return total, total.relu()

    nest = nest_of(both)
    with pytest.raises(NotLowerableError, match="writes one tensor"):
        print_cuda_epilogue(nest)
