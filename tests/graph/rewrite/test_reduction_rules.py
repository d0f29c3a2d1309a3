"""Sums, means, traces and diagonals of matrix products: fire where they should, stay near float64,
keep NaN and infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.graph.rewrite.helpers import capture, close_to_float64, ops, run
from torch_cudal1.graph.rewrite import rewrite
from torch_cudal1.graph.rewrite.reduction_rules import REDUCTION_RULES

Fn = Callable[..., Any]


def draw(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def same_specials(gm: fx.GraphModule, fn: Fn, *inputs: torch.Tensor) -> None:
    """NaN where `fn` has NaN, infinity of the same sign where it has infinity, finite where it is
    finite.
    """
    for got, want in zip(run(gm, *inputs), [fn(*inputs)], strict=True):
        odd = ~torch.isfinite(want)
        assert torch.equal(~torch.isfinite(got), odd)
        torch.testing.assert_close(got[odd], want[odd], rtol=0, atol=0, equal_nan=True)


def rewritten(fn: Fn, *inputs: torch.Tensor) -> Any:
    return rewrite(capture(fn, *inputs), REDUCTION_RULES, assume_finite=False)


LINEAR = ((96, 33), (70, 33), (70,))
LINEAR_3D = ((3, 64, 33), (70, 33), (70,))
PUSHED: list[tuple[str, Fn, tuple[tuple[int, ...], ...]]] = [
    ("columns", lambda x, w, b: F.linear(x, w, b).sum(1, keepdim=True), LINEAR),
    ("columns without bias", lambda x, w: F.linear(x, w).mean(-1), LINEAR[:2]),
    ("columns of a batched linear", lambda x, w, b: F.linear(x, w, b).sum(-1), LINEAR_3D),
    ("rows", lambda x, w, b: F.linear(x, w, b).sum(0), LINEAR),
    ("some rows of a batched linear", lambda x, w, b: F.linear(x, w, b).mean(1), LINEAR_3D),
    (
        "the other rows of it",
        lambda x, w, b: F.linear(x, w, b).sum(0, keepdim=True),
        ((40, 3, 33), (70, 33), (70,)),
    ),
    ("all", lambda x, w, b: F.linear(x, w, b).sum(), LINEAR),
    ("all of a batched linear", lambda x, w, b: F.linear(x, w, b).mean(), LINEAR_3D),
    ("all of a bmm", lambda a, b: (a @ b).sum((1, 2)), ((2, 3, 60, 40), (2, 3, 40, 60))),
    ("columns of a bmm", lambda a, b: (a @ b).mean(-1), ((2, 3, 60, 40), (2, 3, 40, 60))),
    (
        "rows and batch of a bmm",
        lambda a, b: torch.bmm(a, b).sum((0, 1)),
        ((3, 90, 40), (3, 40, 60)),
    ),
    ("a scale between", lambda x, w, b: (F.linear(x, w, b) / -3.5).sum(1), LINEAR),
    (
        "an added vector between",
        lambda x, w, b, v: (F.linear(x, w, b) - v).mean(1),
        (*LINEAR, (70,)),
    ),
    (
        "an added column between",
        lambda x, w, b, v: (2 * (v + F.linear(x, w, b)) + 3).sum((0, 1)),
        (*LINEAR, (96, 1)),
    ),
    (
        "an added matrix between",
        lambda x, w, b, v: (F.linear(x, w, b) + v).sum(0),
        (*LINEAR, (96, 70)),
    ),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in PUSHED], ids=[case[0] for case in PUSHED]
)
def test_a_reduction_goes_before_the_product_and_stays_near_float64(
    fn: Fn, shapes: tuple[tuple[int, ...], ...]
) -> None:
    result = rewritten(fn, *draw(*shapes))
    assert result.sites == {"reduce_before_matmul": 1}
    # Other weights than those it was captured with: nothing of them may be in the graph.
    close_to_float64(result.gm, fn, *draw(*shapes, seed=1))


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in PUSHED], ids=[case[0] for case in PUSHED]
)
def test_nan_and_infinity_of_any_input_come_out_where_eager_has_them(
    fn: Fn, shapes: tuple[tuple[int, ...], ...]
) -> None:
    gm = rewritten(fn, *draw(*shapes)).gm
    for place in range(len(shapes)):
        for value in (math.nan, math.inf, -math.inf):
            for signs in ("mixed", "positive", "partner zero"):
                inputs = draw(*shapes, seed=2)
                if signs != "mixed":
                    inputs = [x.abs() + 0.1 for x in inputs]
                if signs == "partner zero":
                    for x in inputs:
                        x.view(-1)[:: x.shape[-1]] = 0
                inputs[place].view(-1)[[1, inputs[place].numel() - 1]] = value
                same_specials(gm, fn, *inputs)


def test_two_infinities_whose_weights_cancel_are_nan_as_in_eager() -> None:
    fn: Fn = lambda x, w: F.linear(x, w).sum(1)
    x, w = draw((96, 33), (70, 33))
    gm = rewritten(fn, x, w).gm
    x[3, 5], w[:, 5] = math.inf, 1.0
    assert fn(x, w)[3] == math.inf  # one sign: infinite
    close_to_float64(gm, fn, x, w)
    w[7, 5] = -1e-3
    assert fn(x, w)[
        3
    ].isnan()  # both signs, although the sum of the weights is still positive: what the twin is for
    close_to_float64(gm, fn, x, w)


@settings(max_examples=12, deadline=None)
@given(
    m=st.integers(24, 90),
    k=st.integers(1, 60),
    n=st.integers(24, 90),
    dims=st.sampled_from([(0,), (1,), (0, 1)]),
    seed=st.integers(0, 99),
)
@example(m=25, k=5, n=87, dims=(0, 1), seed=80)
def test_ragged_shapes_and_shifted_inputs_stay_near_float64(
    m: int, k: int, n: int, dims: tuple[int, ...], seed: int
) -> None:
    fn: Fn = lambda x, w, b: (F.linear(x, w, b) * 0.5).sum(dims)
    x, w, b = draw((m, k), (n, k), (n,), seed=seed)
    # A single sum may come out near 0, where eager's own error can be smaller than any order's.
    magnitude = float(fn((x + 3).abs(), w.abs(), b.abs()).max())
    close_to_float64(rewritten(fn, x, w, b).gm, fn, x + 3, w, b, magnitude=magnitude)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_floating_types_keep_their_dtype(dtype: torch.dtype) -> None:
    fn: Fn = lambda x, w, b: F.linear(x, w, b).mean(1)
    inputs = draw(*LINEAR, dtype=dtype)
    result = rewritten(fn, *inputs)
    assert result.sites == {"reduce_before_matmul": 1}
    close_to_float64(result.gm, fn, *inputs)


LEFT_ALONE: list[tuple[str, Fn, list[torch.Tensor]]] = [
    (
        "the product is an output too",
        lambda x, w: ((y := F.linear(x, w)), y.sum(1)),
        draw((96, 33), (70, 33)),
    ),
    (
        "the product has another user",
        lambda x, w: (y := F.linear(x, w)).sum(1) + y[:, 0],
        draw((96, 33), (70, 33)),
    ),
    ("relu is not linear", lambda x, w: F.linear(x, w).relu().sum(1), draw((96, 33), (70, 33))),
    (
        "a scale of 0 hides infinities",
        lambda x, w: (F.linear(x, w) * 0).sum(1),
        draw((96, 33), (70, 33)),
    ),
    (
        "a scale by a tensor",
        lambda x, w, s: (F.linear(x, w) * s).sum(1),
        draw((96, 33), (70, 33), ()),
    ),
    ("max does not distribute", lambda x, w: F.linear(x, w).amax(1), draw((96, 33), (70, 33))),
    (
        "another dtype on the way out",
        lambda x, w: F.linear(x, w).sum(1, dtype=torch.float64),
        draw((96, 33), (70, 33)),
    ),
    (
        "a view that mixes rows and columns",
        lambda x, w: F.linear(x, w).view(48, 140).sum(1),
        draw((96, 33), (70, 33)),
    ),
    (
        "float16 sums can overflow on the way",
        lambda x, w: F.linear(x, w).sum(1),
        draw((96, 33), (70, 33), dtype=torch.float16),
    ),
    (
        "integers",
        lambda x, w: (x @ w).sum(1),
        [torch.ones(96, 33, dtype=torch.int64), torch.ones(33, 70, dtype=torch.int64)],
    ),
    (
        "one row: the sum of w costs as much",
        lambda x, w: F.linear(x, w).sum(1),
        draw((1, 33), (70, 33)),
    ),
    (
        "only the batch dim of a bmm",
        lambda a, b: torch.bmm(a, b).sum(0),
        draw((9, 30, 20), (9, 20, 30)),
    ),
    (
        "alpha is not 1",
        lambda c, a, b: torch.addmm(c, a, b, alpha=2).sum(1),
        draw((70,), (96, 33), (33, 70)),
    ),
    ("an empty product", lambda x, w: F.linear(x, w).mean(1), draw((96, 0), (70, 0))),
]


@pytest.mark.parametrize(
    ("fn", "inputs"), [case[1:] for case in LEFT_ALONE], ids=[case[0] for case in LEFT_ALONE]
)
def test_what_is_not_valid_or_not_cheaper_is_left_alone(fn: Fn, inputs: list[torch.Tensor]) -> None:
    assert rewritten(fn, *inputs).sites == {}


DIAGONALS: list[tuple[str, Fn, tuple[tuple[int, ...], ...]]] = [
    ("square", lambda a, b: torch.diagonal(a @ b) * 2, ((20, 30), (30, 20))),
    ("wide", lambda a, b: torch.diagonal(a @ b) * 2, ((20, 30), (30, 47))),
    ("tall", lambda a, b: torch.diagonal(a @ b) * 2, ((47, 30), (30, 20))),
    (
        "batched",
        lambda a, b: torch.diagonal(torch.bmm(a, b), dim1=-2, dim2=-1) * 2,
        ((3, 20, 30), (3, 30, 20)),
    ),
    ("trace", lambda a, b: torch.trace(a @ b), ((20, 30), (30, 20))),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in DIAGONALS], ids=[case[0] for case in DIAGONALS]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_diagonal_multiplies_only_what_it_needs(
    fn: Fn, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    result = rewritten(fn, *draw(*shapes, dtype=dtype))
    assert result.sites == {"diagonal_of_product": 1}
    assert not {"mm.default", "bmm.default"} & set(ops(result.gm))
    inputs = draw(*shapes, dtype=dtype, seed=1)
    close_to_float64(result.gm, fn, *inputs)
    for value in (math.nan, math.inf, -math.inf):
        inputs[0].view(-1)[31] = value
        inputs[1].view(-1)[40] = 0
        close_to_float64(result.gm, fn, *inputs)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: torch.diagonal(a @ b, 1) * 2,
        lambda a, b: torch.diagonal(y := a @ b) + y[0],
        lambda a, b: torch.diagonal(torch.stack([a @ b]), 0, 0, 1) * 2,
    ],
    ids=["another diagonal", "the product is used elsewhere", "other dims"],
)
def test_other_diagonals_are_left_alone(fn: Fn) -> None:
    assert rewritten(fn, *draw((20, 30), (30, 20))).sites == {}


@pytest.mark.parametrize("sign", [1, -1])
def test_vectors_that_cancel_are_taken_together_before_they_are_averaged(sign: int) -> None:
    """A bias near 1 and nearly the same taken away again: apart, each average rounds, and that is
    all that is left of them.
    """

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (F.linear(x, w, b) - v if sign > 0 else F.linear(x, w, b) + v).mean(1)

    x, w, b, v = draw((96, 33), (4096, 33), (4096,), (4096,))
    inputs = [1e-4 * x, w, 1 + b, sign * (1 + b) + 1e-4 * v]
    (output,) = run(rewritten(fn, *inputs).gm, *inputs)
    exact = fn(*(t.double() for t in inputs))
    error, eager = (
        float((t.double() - exact).square().mean().sqrt()) for t in (output, fn(*inputs))
    )
    assert error <= eager
