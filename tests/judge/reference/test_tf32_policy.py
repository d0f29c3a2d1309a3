"""What rights are worth where eager leaves them unused: TF32's error in the classes that have it,
and nothing in the others.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.functional_module import FunctionalModule
from torch_cudal1.graph.lower import lower
from torch_cudal1.ir.records import Contract, Region
from torch_cudal1.judge.checks.module_semantics.parameters import _measure_change
from torch_cudal1.judge.reference.compare import Comparison
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.output_comparison import compare_outputs
from torch_cudal1.judge.reference.region_reference import RegionReference, Result
from torch_cudal1.judge.reference.tf32_policy import Tf32OperandRounding, uses_tf32

X, W, M = (
    torch.randn(shape, generator=torch.Generator().manual_seed(5))
    for shape in ((2, 8, 12, 12), (16, 8, 3, 3), (12, 24))
)


def convolve(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return F.relu(F.conv2d(x, w)) + 0.1


def multiply(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.addmm(m[0], x.reshape(-1, 12), m)


def measure_loss(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())


@pytest.mark.parametrize(
    ("function", "rights", "coarse"),
    [
        (convolve, ("conv",), True),
        (convolve, ("matmul",), False),
        (multiply, ("matmul",), True),
        (multiply, ("conv",), False),
        (multiply, (), False),
    ],
)
def test_the_error_is_tf32s_in_a_class_that_has_the_right(
    function: Callable[..., Any], rights: tuple[str, ...], coarse: bool
) -> None:
    with Tf32OperandRounding(rights):
        result = function(X, W, M)
    exact = function(X.double(), W.double(), M.double())
    assert (measure_loss(result, exact) > 1e-4) is coarse
    assert measure_loss(result, exact) < 1e-3
    assert (not torch.equal(result, function(X, W, M))) is coarse


def test_nan_infinity_and_other_dtypes_are_left_alone() -> None:
    x = X.clone()
    x[0, 0, 0, 0], x[1, 0, 0, 0] = float("nan"), float("inf")
    with Tf32OperandRounding(("conv",)):
        result, half = F.conv2d(x, W), F.conv2d(X.bfloat16(), W.bfloat16())
    assert torch.equal(result.isnan(), F.conv2d(x, W).isnan())
    assert torch.equal(result.isinf(), F.conv2d(x, W).isinf())
    assert torch.equal(half, F.conv2d(X.bfloat16(), W.bfloat16()))


def test_products_of_recurrent_layers_and_attention_use_no_tf32() -> None:
    assert not uses_tf32("lstm", ("conv", "matmul"))
    assert not uses_tf32("_scaled_dot_product_flash_attention", ("conv", "matmul"))


def compare_with_rights(out: torch.Tensor, rights: tuple[str, ...]) -> Comparison:
    """One output beside eager's convolution, which is as exact as fp32 can be."""

    def compute_with_rights(inputs: Any) -> Any:
        if "conv" not in rights:
            return None
        with Tf32OperandRounding(rights):
            return [convolve(X, W, M)]

    reference = SimpleNamespace(eager_with_tf32=compute_with_rights)
    facts, contract = SimpleNamespace(longest_reduction=72), SimpleNamespace(precision="match")
    trial: Any = SimpleNamespace(
        reference=reference, facts=facts, contract=contract, accepted_outputs={}
    )
    exact = [convolve(X.double(), W.double(), M.double())]
    sample = InputSet(
        "s",
        "normal",
        [X, W, M],
        lambda inputs: Result([convolve(X, W, M)], [None]),
        lambda inputs: exact,
    )
    ((_, comparison),) = compare_outputs(trial, sample, [out])
    return comparison


def convolve_in_tf32() -> torch.Tensor:
    """What a kernel of TF32 products yields, summed in another order."""
    with Tf32OperandRounding(("conv",)):
        return F.relu(F.conv2d(X.flip(1), W.flip(1))) + 0.1


def test_a_candidate_may_use_a_right_that_eager_leaves_unused_and_the_evidence_says_so() -> None:
    comparison = compare_with_rights(convolve_in_tf32(), ("conv",))
    assert comparison.passed
    assert "eager makes no use" in comparison.detail
    assert comparison.ratio is not None
    assert comparison.ratio < 1.5


def test_without_the_right_tf32_is_refused() -> None:
    assert not compare_with_rights(convolve_in_tf32(), ()).passed
    assert not compare_with_rights(convolve_in_tf32(), ("matmul",)).passed


def test_a_right_to_tf32_is_none_to_less() -> None:
    assert not compare_with_rights(
        F.relu(F.conv2d(X.bfloat16(), W.bfloat16())).float() + 0.1, ("conv",)
    ).passed
    assert not compare_with_rights(convolve_in_tf32() * 1.01, ("conv",)).passed
    wrong = convolve_in_tf32()
    wrong[1, 3, 4, 4] += 0.5
    assert not compare_with_rights(wrong, ("conv",)).passed


@pytest.mark.parametrize(("rights", "passes"), [(("conv",), True), ((), False)])
def test_a_change_of_one_input_may_be_as_coarse_as_the_right_allows(
    rights: tuple[str, ...], passes: bool
) -> None:
    """Eager's own change is fp32's; a candidate in TF32 reproduces it within TF32's error."""

    def compute_with_rights(inputs: Any) -> Any:
        with Tf32OperandRounding(rights):
            return [convolve(*inputs)] if rights else None

    def sample(w: torch.Tensor) -> tuple[InputSet, list[torch.Tensor | None]]:
        with Tf32OperandRounding(("conv",)):
            in_other_order = convolve(X.flip(1), w.flip(1), M)
        exact = [convolve(X.double(), w.double(), M.double())]
        eager = Result([convolve(X, w, M)], [None])
        return InputSet("s", "normal", [X, w, M], lambda inputs: eager, lambda inputs: exact), [
            in_other_order
        ]

    trial: Any = SimpleNamespace(reference=SimpleNamespace(eager_with_tf32=compute_with_rights))
    change = _measure_change(trial, sample(W), sample(W * 1.3), 0)
    assert change is not None
    assert change.is_visible
    assert (change.error <= change.limit) is passes


def test_a_region_of_convolutions_is_computed_in_tf32_too() -> None:
    region = lower_one(Convolution(), (X, W))
    coarse = RegionReference(
        region, Contract("match", ("conv",)), torch.device("cpu")
    ).eager_with_tf32([X, W])
    assert coarse is not None
    assert coarse[0] is not None
    assert 1e-4 < measure_loss(coarse[0], F.conv2d(X.double(), W.double())) < 1e-3
    for contract in (Contract("match", ("matmul",)), Contract("strict", ("conv",)), Contract()):
        assert (
            RegionReference(region, contract, torch.device("cpu")).eager_with_tf32([X, W]) is None
        )


class Convolution(nn.Module):
    """The operator alone."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w)


def lower_one(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Region:
    with torch.no_grad():
        (graph,) = trace(FunctionalModule(module, inputs, {}), list(inputs)).graphs
    return lower(graph.module, static=graph.static, name="one").region
