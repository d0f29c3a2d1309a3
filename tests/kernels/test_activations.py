"""Activations of float types only, with their numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.kernels.expr.nodes import Map, find_nodes
from torch_cudal1.kernels.ops import activations, pointwise
from torch_cudal1.kernels.registry import trace

X = torch.empty(8, 10)


def test_they_are_part_of_the_element_wise_table() -> None:
    assert activations.HANDLERS.items() <= pointwise.HANDLERS.items()


@pytest.mark.parametrize(("approximate", "function"), [("none", "erf"), ("tanh", "tanh")])
def test_gelu_has_a_form_for_each_approximation(approximate: str, function: str) -> None:
    traced = trace(trace_program(lambda x: F.gelu(x, approximate=approximate), (X,)))
    templates = [node.template for node in find_nodes(Map, (traced.outputs[0].node,))]
    assert any(f"libdevice.{function}(" in template for template in templates)
