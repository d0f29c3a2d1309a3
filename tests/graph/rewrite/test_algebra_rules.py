"""Diagonal products and folded scalars: as accurate as before, NaN and infinity where they were,
and untouched where not valid.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cudal1.graph.rewrite import rewrite
from torch_cudal1.graph.rewrite.algebra_rules import ALGEBRA_RULES as RULES
from torch_cudal1.graph.rewrite.identity_rules import IDENTITY_RULES as CLEAN

from .helpers import capture, close_to_float64, ops, run

NAN, INF = float("nan"), float("inf")
ODD = (NAN, INF, -INF, 0.0, -0.0)
V5, V7 = torch.randn(5), torch.randn(7)
M57, M75, M55 = torch.randn(5, 7), torch.randn(7, 5), torch.randn(5, 5)
BIG = torch.randn(64, 8)
NARROW = torch.randn(8, 64)

# function, inputs: written as users write it
DIAGONAL: list[tuple[Any, tuple[torch.Tensor, ...]]] = [
    (lambda v, b: torch.diag(v) @ b, (V5, M57)),
    (lambda v, a: a @ torch.diag(v), (V7, M57)),
    (lambda v, b: torch.diag(v).t() @ b, (V5, M57)),
    (lambda v, b: torch.diag(v) @ b.t(), (V5, M75)),
    (lambda v, x: torch.diag(v) @ x, (V5, V5)),
    (lambda v, b: torch.diag_embed(v) @ b, (torch.randn(3, 5), torch.randn(3, 5, 4))),
    (lambda v, a: a @ torch.diag_embed(v), (torch.randn(3, 5), torch.randn(3, 4, 5))),
    (lambda v, b: torch.diag_embed(v).mT @ b, (torch.randn(3, 5), torch.randn(3, 5, 4))),
    (lambda v, b: torch.diag(v) @ b, (V5, torch.randn(3, 5, 4))),
    (
        lambda v, b, c: torch.addmm(c, torch.diag(v), b, beta=0.5, alpha=2.0),
        (V5, M57, torch.randn(7)),
    ),
    (lambda v, b, c: torch.addmm(c, torch.diag(v), b, beta=0), (V5, M57, torch.full((7,), NAN))),
    (
        lambda v, b, c: torch.baddbmm(c, torch.diag_embed(v), b),
        (torch.randn(3, 5), torch.randn(3, 5, 4), torch.randn(3, 1, 4)),
    ),
    (lambda v, w: F.linear(torch.diag(v), w), (V5, M75)),
    (lambda v, b: torch.diag(v) @ b, (V5.bfloat16(), M57.bfloat16())),
    (lambda v, b: torch.diag(v) @ b, (V5.double(), M57.double())),
    (lambda v, b: torch.diag(v) @ b, (torch.arange(5), torch.arange(35).view(5, 7))),
]
NOT_DIAGONAL: list[tuple[Any, tuple[torch.Tensor, ...]]] = [
    (lambda v, b: torch.diag_embed(v, offset=1) @ b, (torch.randn(4), M57)),
    (
        lambda v, b: torch.diag_embed(v, dim1=0, dim2=2) @ b,
        (torch.randn(3, 5), torch.randn(5, 3, 5, 4)[:, 0]),
    ),
    (lambda v, b: (torch.diag(v) + 1) @ b, (V5, M57)),
    (
        lambda v, b: torch.diag_embed(v).transpose(0, 1) @ b,
        (torch.randn(5, 5), torch.randn(5, 5, 4)),
    ),
]


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize(("fn", "inputs"), DIAGONAL)
def test_a_diagonal_factor_becomes_a_scale(
    fn: Any, inputs: tuple[torch.Tensor, ...], finite: bool
) -> None:
    out = rewrite(capture(fn, *inputs), (*CLEAN, *RULES), assume_finite=finite)
    assert ("diag_matmul_finite" if finite else "diag_matmul") in out.techniques
    assert not any(
        name.split(".")[0] in ("mm", "bmm", "mv", "addmm", "baddbmm", "diag_embed")
        for name in ops(out.gm)
    )
    close_to_float64(out.gm, fn, *inputs)


@pytest.mark.parametrize(("fn", "inputs"), NOT_DIAGONAL)
def test_what_is_not_a_plain_diagonal_stays(fn: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    out = rewrite(capture(fn, *inputs), (*CLEAN, *RULES), assume_finite=True)
    assert not {"diag_matmul", "diag_matmul_finite"} & set(out.techniques)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_nan_and_infinity_spread_as_in_the_product(data: st.DataObject) -> None:
    fn, inputs = data.draw(st.sampled_from(DIAGONAL[:9]))
    spoilt = [x.clone() for x in inputs]
    for x in spoilt:
        for position in data.draw(st.lists(st.integers(0, x.numel() - 1), max_size=3)):
            x.view(-1)[position] = data.draw(st.sampled_from(ODD))
    out = rewrite(capture(fn, *spoilt), (*CLEAN, *RULES), assume_finite=False)
    assert "diag_matmul" in out.techniques
    close_to_float64(out.gm, fn, *spoilt)


def test_the_finite_form_is_indeed_wrong_with_infinity() -> None:
    v, b = torch.ones(2), torch.tensor([[INF, 1.0], [1.0, 1.0]])
    gm = capture(lambda v, b: torch.diag(v) @ b, v, b)
    eager, finite = run(gm, v, b)[0], run(rewrite(gm, RULES, assume_finite=True).gm, v, b)[0]
    assert eager[1, 0].isnan()
    assert finite[1, 0] == 1.0


# function, inputs, op the scale went with
FOLDS: list[tuple[Any, tuple[torch.Tensor, ...], str]] = [
    (lambda x, w: (x @ w) * 0.3, (BIG, NARROW), "mul.Tensor"),
    (lambda x, w: (x @ w) / 7, (BIG, NARROW), "div.Tensor"),
    (lambda x, w: -(x @ w), (BIG, NARROW), "neg.default"),
    (lambda x, w: (x * 3.0) @ w, (BIG, NARROW), "mul.Tensor"),
    (lambda x, w: F.linear(x.view(4, 16, 8), w) * 0.5, (BIG, torch.randn(5, 8)), "mul.Tensor"),
    (
        lambda q, k: torch.bmm(q, k.mT) / 2.5,
        (torch.randn(2, 6, 4), torch.randn(2, 6, 4)),
        "div.Tensor",
    ),
    (
        lambda x, w, b: torch.baddbmm(b, x, w) * 0.5,
        (torch.randn(2, 6, 4), torch.randn(2, 4, 3), torch.randn(2, 6, 3)),
        "mul.Tensor",
    ),
    (lambda x, w: (x @ w) * 0.3, (BIG.bfloat16(), NARROW.bfloat16()), "mul.Tensor"),
]
KEEPS: list[tuple[Any, tuple[torch.Tensor, ...]]] = [
    (lambda x, w: (x @ w) * 0.0, (BIG, NARROW)),  # NaN must survive
    (lambda x, w: (x @ w) * INF, (BIG, NARROW)),
    (lambda x, w: (lambda y: (y * 2.0, y))(x @ w), (BIG, NARROW)),  # the product is needed as it is
    (lambda x, w: (x @ w) * 2, (BIG.long(), NARROW.long())),
    (
        lambda q, k: torch.softmax(torch.bmm(q, k.mT) / 2.5, -1),
        (torch.randn(2, 6, 4), torch.randn(2, 6, 4)),
    ),
    (
        lambda q, k, v: F.relu(torch.bmm(q, k.mT) / 2.5).view(2, 6, 6) @ v,
        tuple(torch.randn(3, 2, 6, 4)),
    ),  # attention without softmax
    (
        lambda x, w: F.conv2d(x, w) * 0.5,
        (torch.randn(1, 3, 3, 3), torch.randn(4, 3, 3, 3)),
    ),  # the weight is larger than the output
    (lambda x, w: F.conv2d(x, w) * 1e-9, (torch.randn(2, 3, 16, 16), torch.randn(4, 3, 3, 3))),
    (
        lambda x, w: F.conv2d(x, w) * 0.3,
        (torch.randn(2, 3, 16, 16).bfloat16(), torch.randn(4, 3, 3, 3).bfloat16()),
    ),
    (lambda x, w: (x[:0] @ w) * 2.0, (BIG, NARROW)),
]


@pytest.mark.parametrize(("fn", "inputs", "removed_op"), FOLDS)
def test_a_scale_goes_into_the_product(
    fn: Any, inputs: tuple[torch.Tensor, ...], removed_op: str
) -> None:
    out = rewrite(capture(fn, *inputs), (*CLEAN, *RULES), assume_finite=False)
    assert "scalar_folding" in out.techniques
    assert not ops(out.gm)[removed_op]
    close_to_float64(out.gm, fn, *inputs)
    spoilt = [x.clone() for x in inputs]
    spoilt[0].view(-1)[0], spoilt[1].view(-1)[1] = NAN, -INF
    close_to_float64(out.gm, fn, *spoilt)


@pytest.mark.parametrize(("fn", "inputs"), KEEPS)
def test_a_scale_stays_where_folding_is_not_valid(
    fn: Any, inputs: tuple[torch.Tensor, ...]
) -> None:
    gm = capture(fn, *inputs)
    out = rewrite(gm, RULES, assume_finite=True)
    assert out.techniques == ()
    assert ops(out.gm) == ops(gm)


@pytest.mark.parametrize("bias", [True, False])
def test_the_scale_of_a_convolution_goes_into_its_weight(bias: bool) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b if bias else None, padding=1) * 0.3

    inputs = torch.randn(2, 3, 16, 16), torch.randn(4, 3, 3, 3), torch.randn(4)
    out = rewrite(capture(fn, *inputs), RULES, assume_finite=False)
    assert out.techniques == ("scalar_folding",)
    assert list(out.gm.graph.nodes)[-2].target is torch.ops.aten.convolution.default
    close_to_float64(out.gm, fn, *inputs)


def test_the_bias_of_a_linear_layer_is_scaled_apart() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w, b) * 2.5

    inputs = BIG, torch.randn(16, 8), torch.randn(16)
    out = rewrite(capture(fn, *inputs), RULES, assume_finite=False)
    (product,) = [
        node for node in out.gm.graph.nodes if node.target is torch.ops.aten.addmm.default
    ]
    assert product.kwargs == {"beta": 1, "alpha": 2.5}
    assert product.args[0].meta["val"].shape == (16,)
    close_to_float64(out.gm, fn, *inputs)


def test_a_learned_scale_is_folded_only_for_finite_values() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (x @ w) * s.exp()

    inputs = BIG, NARROW, torch.tensor(0.7)
    gm = capture(fn, *inputs)
    assert rewrite(gm, RULES, assume_finite=False).techniques == ()
    out = rewrite(gm, RULES, assume_finite=True)
    assert out.techniques == ("tensor_scale_folding",)
    assert list(out.gm.graph.nodes)[-2].target is torch.ops.aten.mm.default
    close_to_float64(out.gm, fn, *inputs)


def test_a_random_scale_is_not_moved() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w) * torch.rand(())

    assert rewrite(capture(fn, BIG, NARROW), RULES, assume_finite=True).techniques == ()


def test_scales_in_a_row_become_one() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return -((x * 3.0) / 7) * 2

    out = rewrite(capture(fn, BIG), RULES, assume_finite=False)
    assert ops(out.gm) == {"mul.Tensor": 1}
    close_to_float64(out.gm, fn, BIG)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x + 1e8) - 1e8,  # rounds on purpose
        lambda x: (x * 1e-30) * 1e30,
        lambda x: (x * 0.0) * 2.0,
        lambda x: (lambda y: y * 2.0 + y)(x * 3.0),
    ],
)
def test_chains_that_must_not_be_joined_stay(fn: Any) -> None:
    gm = capture(fn, BIG)
    assert ops(rewrite(gm, RULES, assume_finite=True).gm) == ops(gm)
