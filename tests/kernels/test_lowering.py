"""`propose` covers what it can compute exactly and says nothing about the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import Aten, Call, Program, TensorSpec, Value
from torch_cudal1.kernels import propose
from torch_cudal1.kernels.codegen.multi_kernel import find_first_nest
from torch_cudal1.kernels.registry import trace

aten = torch.ops.aten
X, S = torch.zeros(8, 12), torch.zeros(12, 12)
Function = Callable[..., object]

FAMILIES: dict[str, tuple[Function, tuple[torch.Tensor, ...], str]] = {
    "softmax": (lambda x: F.softmax(x, -1), (X,), "softmax"),
    "norm with an epilogue": (lambda x: F.relu(F.layer_norm(x, (12,))), (X,), "norm"),
    "reduction": (lambda x: (x * x).sum(1), (X,), "reduction"),
    "arg-reduction": (lambda x: x.argmax(1), (X,), "reduction"),
    "scan": (lambda x: (x * x).cumsum(1), (X,), "scan"),
    "loss": (lambda x: F.smooth_l1_loss(x, x * 2), (X,), "loss"),
    "chain": (lambda x: torch.tanh(x) * 2, (X,), "elementwise"),
}
REFUSED: dict[str, tuple[Function, tuple[torch.Tensor, ...], str]] = {
    "an unknown op": (lambda x: torch.roll(x, 1, 0) + 1, (X,), "aten.roll"),
    "a scan of what another scan yields, across": (
        lambda x: x.cumsum(0).cumsum(1),
        (X,),
        "another dimension",
    ),
    "a pool with its places": (
        lambda x: aten.max_pool2d_with_indices(x[None], [2, 2]),
        (X,),
        "no kernel yields",
    ),
    "a pool of what is computed": (
        lambda x: aten.avg_pool2d(x[None] * 2, [2, 2]),
        (X,),
        "once for every tap",
    ),
    "a pool beyond its input": (
        lambda x: aten.avg_pool2d(x[None], [5, 5], [5, 5], [0, 0], True),
        (X,),
        "leaves the padded",
    ),
    "a pool with a large window": (
        lambda x: aten.avg_pool2d(x[None], [8, 12]),
        (X,),
        "a window of",
    ),
    "a flip without a scan": (lambda x: x.flip(0) * 2, (X,), "Flip has no kernel"),
    "a concatenation of many": (lambda x: torch.cat((x,) * 9), (X,), "a concatenation of 9 pieces"),
    "running sums of some elements only": (
        lambda x: torch.cat((X[:, :1] * 0, x[:, 1:].cumsum(1)), 1),
        (X,),
        "concatenation",
    ),
    "likelihoods of weighted classes": (
        lambda x, t, w: F.nll_loss(x, t, w),
        (X, torch.zeros(8).long(), X[0]),
        "weights",
    ),
    "random numbers": (lambda x: torch.bernoulli(x) * 2, (X,), "aten.bernoulli"),
    "float64": (lambda x: x + 1, (X.double(),), "is float64"),
    "an 8-bit type": (lambda x: x + 1, (X.to(torch.uint8),), "dtype='uint8'"),
    "complex numbers": (lambda x: x * 2, (X.to(torch.complex64),), "is complex64"),
    "no elements": (lambda x: x + 1, (torch.zeros(0, 4),), r"shape \(0, 4\)"),
    "an output that is an input": (lambda x: (x, x + 1), (X,), "shares memory"),
    "an output that views an input": (lambda x: x.t(), (X,), "shares memory"),
    "two outputs that share memory": (lambda x: _with_view(x + 1), (X,), "shares memory"),
    "an expanded output": (lambda x: (x[:, :1] + 1).expand(8, 12), (X,), "not dense"),
    "outputs of different sizes": (lambda x: (x + 1, x[:2] * 2), (X,), "24 elements"),
    "reductions over different dimensions": (
        lambda x: x.softmax(0).softmax(1),
        (S,),
        "every column",
    ),
    "reductions of different lengths": (
        lambda x: x / (x.sum(0, keepdim=True) + x.sum(1, keepdim=True)),
        (X,),
        "every column",
    ),
    "a reduction inside another one": (lambda x: (x - x.mean(0)).amax(1), (X,), "8 elements"),
    "integer division": (
        lambda x: torch.div(x, 3, rounding_mode="floor"),
        (X.long(),),
        "div.Tensor_mode",
    ),
    "a third-order norm": (lambda x: torch.linalg.vector_norm(x, 3, 1), (X,), "order 3"),
}


def _with_view(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y, y.view(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fusion_group_is_named_after_its_anchor(name: str) -> None:
    function, inputs, family = FAMILIES[name]
    proposals = propose(trace_program(function, inputs), 90)
    assert 1 <= len(proposals) <= 6
    assert {proposal.family for proposal in proposals} == {family}
    assert len({str(proposal.to_json()) for proposal in proposals}) == len(proposals)


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_proposed_and_lowering_says_why_for(name: str) -> None:
    function, inputs, word = REFUSED[name]
    reference = trace_program(function, inputs)
    assert propose(reference, 90) == ()
    with pytest.raises(NotLowerableError, match=word):
        find_first_nest(trace(reference).outputs)


def test_cpu_programs_nested_programs_and_old_devices_get_nothing() -> None:
    reference = trace_program(*FAMILIES["chain"][:2])
    assert propose(reference, 80)
    assert propose(reference, 75) == ()
    assert propose(trace_program(*FAMILIES["chain"][:2], device="cpu"), 90) == ()
    nested = Program(reference.inputs, (Call(reference, (0,), (1,)),), (1,))
    assert propose(nested, 90) == ()


def test_a_cpu_scalar_beside_cuda_tensors_gets_nothing() -> None:
    scalar = TensorSpec("float32", (), (), "cpu")
    reference = Program(
        (TensorSpec("float32", (8,), (1,), "cuda"), scalar),
        (Aten("aten.mul.Tensor", (Value(0), Value(1)), (), (2,)),),
        (2,),
    )
    assert propose(reference, 90) == ()
    assert propose(
        replace(reference, inputs=(reference.inputs[0], replace(scalar, device="cuda"))), 90
    )


def test_a_positional_argument_given_by_name_is_refused_and_not_overlooked() -> None:
    spec = TensorSpec("float32", (8, 12), (12, 1), "cuda")
    by_position = Program(
        (spec,), (Aten("aten.sum.dim_IntList", (Value(0), (1,)), (), (1,)),), (1,)
    )
    by_name = Program(
        (spec,), (Aten("aten.sum.dim_IntList", (Value(0),), (("dim", (1,)),), (1,)),), (1,)
    )
    assert propose(by_position, 90)
    assert propose(by_name, 90) == ()
