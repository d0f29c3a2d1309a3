"""The numbers of a fusion group, and the bounds on a proposal's time."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.kernels import Proposal, propose
from torch_cudal1.kernels.features import extract_features


def test_a_product_tells_its_sizes_and_layout_and_bounds_each_proposal() -> None:
    program = trace_program(torch.mm, (torch.empty(256, 128), torch.empty(128, 512)))
    features = extract_features(program)
    assert features is not None
    assert {name: features.sizes[name] for name in ("batch", "m", "n", "k")} == {
        "batch": 1,
        "m": 256,
        "n": 512,
        "k": 128,
    }
    assert (features.sizes["left_along_k"], features.sizes["right_along_k"]) == (1, 0)
    bounds = [features.lower_bound_us(proposal) for proposal in propose(program, 90)]
    assert all(0 < bound < math.inf for bound in bounds)
    assert len(set(bounds)) > 1
    assert features.lower_bound_us(Proposal("gemm", {"method": "no such method"})) == math.inf


def test_a_depthwise_convolution_has_the_bound_of_its_region() -> None:
    x, w = torch.empty(2, 8, 16, 16), torch.empty(8, 1, 3, 3)
    program = trace_program(lambda x, w: F.conv2d(x, w, padding=1, groups=8), (x, w))
    features = extract_features(program)
    assert features is not None
    assert features.sizes["groups"] == 8
    (first, *_) = propose(program, 90)
    assert features.lower_bound_us(first) == features.region_bound_us


def test_a_row_operation_tells_the_rows_of_its_largest_tensor() -> None:
    features = extract_features(trace_program(lambda x: x.softmax(-1), (torch.empty(6, 7, 100),)))
    assert features is not None
    assert (features.sizes["rows"], features.sizes["columns"]) == (42, 100)
    assert features.lower_bound_us(Proposal("softmax", {})) == features.region_bound_us


def test_what_no_template_covers_has_no_features() -> None:
    spec = TensorSpec("float32", (8,), (1,), "cuda")
    program = Program((spec,), (Aten("aten.sin.default", (Value(0),), (), (1,)),), (1,))
    assert extract_features(program) is None
