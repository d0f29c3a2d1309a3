"""Batch norm folded into weights and broadcasts that are not copied: right for all data, refused
where they would not be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.graph.rewrite.helpers import capture, capture_module, close_to_float64, ops, run, same
from tests.graph.rewrite.test_reduction_rules import draw
from torch_cudal1.graph.rewrite import rewrite
from torch_cudal1.graph.rewrite.fusion_rules import FUSION_RULES

Fn = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]
X, NORM = (2, 4, 9, 8), ((6,),) * 4


def norm(
    x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> torch.Tensor:
    return F.batch_norm(x, mean, var.abs() + 0.5, gain, bias)


FOLDS: list[tuple[str, str, Fn, Shapes]] = [
    (
        "conv",
        "conv_batchnorm_fold",
        lambda x, w, b, *n: norm(F.conv2d(x, w, b, padding=1), *n),
        (X, (6, 4, 3, 3), (6,), *NORM),
    ),
    (
        "no bias",
        "conv_batchnorm_fold",
        lambda x, w, *n: norm(F.conv2d(x, w, stride=2), *n),
        (X, (6, 4, 3, 3), *NORM),
    ),
    (
        "groups",
        "conv_batchnorm_fold",
        lambda x, w, b, *n: norm(F.conv2d(x, w, b, groups=2), *n),
        (X, (6, 2, 3, 3), (6,), *NORM),
    ),
    (
        "transposed",
        "conv_batchnorm_fold",
        lambda x, w, *n: norm(F.conv_transpose2d(x, w), *n),
        (X, (4, 6, 3, 3), *NORM),
    ),
    (
        "linear",
        "linear_batchnorm_fold",
        lambda x, w, b, *n: norm(F.linear(x, w, b), *n),
        ((20, 7), (6, 7), (6,), *NORM),
    ),
    ("mm", "linear_batchnorm_fold", lambda x, w, *n: norm(x @ w, *n), ((20, 7), (7, 6), *NORM)),
    (
        "before",
        "batchnorm_conv_fold",
        lambda x, w, b, *n: F.conv2d(norm(x, *n), w, b),
        ((2, 6, 9, 8), (5, 6, 3, 3), (5,), *NORM),
    ),
    (
        "before, stride",
        "batchnorm_conv_fold",
        lambda x, w, *n: F.conv1d(norm(x, *n), w, stride=2),
        ((2, 6, 9), (5, 6, 3), *NORM),
    ),
]


@pytest.mark.parametrize(
    ("name", "fn", "shapes"), [case[1:] for case in FOLDS], ids=[case[0] for case in FOLDS]
)
def test_a_batch_norm_is_folded_with_the_parameters_of_each_call(
    name: str, fn: Fn, shapes: Shapes
) -> None:
    gm = capture(fn, *draw(*shapes))
    rewritten = rewrite(gm, FUSION_RULES, assume_finite=True)
    assert rewritten.sites == {name: 1}
    assert not any("batch_norm" in op for op in ops(rewritten.gm))
    for seed in (
        1,
        2,
    ):  # neither the parameters nor the statistics of the capture may be in the graph
        close_to_float64(rewritten.gm, fn, *draw(*shapes, seed=seed), slack=8)


@pytest.mark.parametrize(
    ("name", "fn", "shapes"), [case[1:] for case in FOLDS], ids=[case[0] for case in FOLDS]
)
def test_a_batch_norm_stays_without_assume_finite(name: str, fn: Fn, shapes: Shapes) -> None:
    assert rewrite(capture(fn, *draw(*shapes)), FUSION_RULES, assume_finite=False).sites == {}


def test_folding_is_finite_only_because_an_infinite_gain_tells_the_forms_apart() -> None:
    _, _, fn, shapes = FOLDS[0]
    inputs = draw(*shapes)
    folded = rewrite(capture(fn, *inputs), FUSION_RULES, assume_finite=True).gm
    inputs[-4][1] = math.inf
    assert fn(*inputs)[:, 1].isinf().any()
    assert run(folded, *inputs)[0][:, 1].isnan().all()


@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(3, 9),
    width=st.integers(1, 9),
    kernel=st.integers(1, 3),
    eps=st.sampled_from([1e-5, 1e-3]),
    seed=st.integers(0, 99),
)
def test_any_size_and_eps_stay_near_float64(
    size: int, width: int, kernel: int, eps: float, seed: int
) -> None:
    fn: Fn = lambda x, w, g, b, m, v: F.batch_norm(F.conv1d(x, w), m, v.abs() + 0.1, g, b, eps=eps)
    inputs = draw((2, 3, size), (width, 3, kernel), *((width,),) * 4, seed=seed)
    rewritten = rewrite(capture(fn, *inputs), FUSION_RULES, assume_finite=True)
    assert rewritten.techniques == ("conv_batchnorm_fold",)
    close_to_float64(rewritten.gm, fn, *inputs, slack=8)


def test_modules_as_users_write_them_are_folded() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 5, 1),
        nn.BatchNorm2d(5, affine=False),
    )
    gm, flat = capture_module(block.eval(), torch.randn(2, 3, 9, 9))
    rewritten = rewrite(gm, FUSION_RULES, assume_finite=True)
    assert rewritten.sites == {"conv_batchnorm_fold": 2}
    torch.testing.assert_close(
        run(rewritten.gm, *flat)[0], block(flat[-1]).detach(), rtol=1e-5, atol=1e-5
    )


UNFOLDED: list[tuple[str, Fn, Shapes]] = [
    (
        "training statistics",
        lambda x, w: F.batch_norm(F.conv2d(x, w), None, None, training=True),
        (X, (6, 4, 3, 3)),
    ),
    (
        "the convolution is used elsewhere",
        lambda x, w, *n: norm(y := F.conv2d(x, w), *n) + y,
        (X, (6, 4, 3, 3), *NORM),
    ),
    (
        "something between",
        lambda x, w, *n: norm(F.conv2d(x, w).relu(), *n),
        (X, (6, 4, 3, 3), *NORM),
    ),
    (
        "padding after the norm",
        lambda x, w, *n: F.conv2d(norm(x, *n), w, padding=1),
        ((2, 6, 9, 8), (5, 6, 3, 3), *NORM),
    ),
    (
        "groups after the norm",
        lambda x, w, *n: F.conv2d(norm(x, *n), w, groups=2),
        ((2, 6, 9, 8), (4, 3, 3, 3), *NORM),
    ),
    (
        "the norm is used elsewhere",
        lambda x, w, *n: (y := norm(x, *n)).sum() + F.conv2d(y, w),
        ((2, 6, 9, 8), (5, 6, 3, 3), *NORM),
    ),
    (
        "transposed groups",
        lambda x, w, *n: norm(F.conv_transpose2d(x, w, groups=2), *n),
        (X, (4, 3, 3, 3), *NORM),
    ),
    ("fewer rows than the weight has", lambda x, w, *n: norm(x @ w, *n), ((2, 40), (40, 6), *NORM)),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in UNFOLDED], ids=[case[0] for case in UNFOLDED]
)
def test_a_batch_norm_is_not_folded_where_that_would_be_wrong_or_dearer(
    fn: Fn, shapes: Shapes
) -> None:
    assert rewrite(capture(fn, *draw(*shapes)), FUSION_RULES, assume_finite=True).sites == {}


def test_half_convolutions_keep_their_batch_norm() -> None:
    inputs = draw(X, (6, 4, 3, 3), *NORM, dtype=torch.bfloat16)
    fn: Fn = lambda x, w, *n: norm(F.conv2d(x, w), *n)
    assert rewrite(capture(fn, *inputs), FUSION_RULES, assume_finite=True).sites == {}


BROADCASTS: list[tuple[str, Fn, Shapes]] = [
    ("clone", lambda a, b: a.expand(4, 5).clone() * b, ((1, 5), (4, 5))),
    ("contiguous", lambda a, b: a[:, None].expand(-1, 4, -1).contiguous() + b, ((2, 5), (2, 4, 5))),
    ("repeat", lambda a, b: torch.maximum(a.repeat(4, 1), b), ((1, 5), (4, 5))),
    ("repeat to more dims", lambda a, b: b - a.repeat(4, 1, 1), ((3, 5), (4, 3, 5))),
    ("used twice", lambda a, b: (c := a.expand(4, 5).clone()) * b + c, ((1, 5), (4, 5))),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in BROADCASTS], ids=[case[0] for case in BROADCASTS]
)
def test_a_broadcast_is_read_not_copied(fn: Fn, shapes: Shapes) -> None:
    rewritten = rewrite(capture(fn, *draw(*shapes)), FUSION_RULES, assume_finite=False)
    assert rewritten.sites == {"broadcast_without_copy": 1}
    assert not {"clone.default", "repeat.default"} & set(ops(rewritten.gm))
    inputs = draw(*shapes, seed=1)
    inputs[0].view(-1)[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    same(run(rewritten.gm, *inputs), [fn(*inputs)])


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda a: a.expand(4, 5).clone(), ((1, 5),)),
        (lambda a, b: a.expand(4, 5).clone() @ b, ((1, 5), (5, 3))),
        (lambda a, b: a.t().clone() * b, ((5, 4), (4, 5))),
        (lambda a, b: a.repeat(2, 1) * b, ((2, 5), (4, 5))),
    ],
    ids=[
        "the copy is the output",
        "a product reads it often",
        "each element is copied once",
        "blocks are repeated, not elements",
    ],
)
def test_other_copies_stay(fn: Fn, shapes: Shapes) -> None:
    assert rewrite(capture(fn, *draw(*shapes)), FUSION_RULES, assume_finite=False).sites == {}
