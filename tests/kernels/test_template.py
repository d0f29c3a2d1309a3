"""A template's value: which expressions it matches, and what it keeps of its proposals."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels import Proposal
from torch_cudal1.kernels.registry import find_template, trace
from torch_cudal1.kernels.template import (
    LoweredKernels,
    TemplateInput,
    keep_lowerable,
    target_names,
)


def test_operators_are_named_as_steps_name_them() -> None:
    names = ["mm.default", "prims.convert_element_type.default", "cudal1.log_bessel_i.default"]
    assert target_names(names) == {"aten.mm.default", *names[1:]}


def test_only_proposals_that_lower_are_kept() -> None:
    def lower(workload: TemplateInput, proposal: Proposal) -> LoweredKernels:
        if proposal.config["rows"] == 2:
            raise NotLowerableError("two rows")
        return LoweredKernels((), {})

    workload = TemplateInput(trace_program(torch.relu, (torch.empty(8),)))
    proposals = [Proposal("elementwise", {"rows": rows}) for rows in (1, 2, 3)]
    assert keep_lowerable(lower, workload, proposals) == (proposals[0], proposals[2])


def test_a_workload_without_expressions_says_so() -> None:
    with pytest.raises(NotLowerableError, match="expressions"):
        _ = TemplateInput(trace_program(torch.relu, (torch.empty(8),))).trace


def test_two_products_are_attention_unless_there_is_a_convolution() -> None:
    x = torch.empty(2, 64, 32)
    nodes = tuple(o.node for o in trace(trace_program(lambda x: x @ x.mT @ x, (x,))).outputs)
    attention = find_template("attention")
    assert attention is not None
    assert attention.matches({"gemm"}, nodes)
    assert not attention.matches({"gemm", "conv"}, nodes)


def test_resources_of_a_tiled_product_are_known_before_it_is_compiled() -> None:
    gemm = find_template("gemm")
    assert gemm is not None
    tile = {"method": "half", "rows": 128, "columns": 64, "depth": 64, "warps": 4, "stages": 3}
    resources = gemm.estimate_resources(Proposal("gemm", tile))
    assert resources.shared_bytes == 3 * 64 * (128 + 64) * 2
    assert resources.accumulators_per_thread == 64
    assert gemm.estimate_resources(Proposal("gemm", {"method": "fold"})).shared_bytes == 0
