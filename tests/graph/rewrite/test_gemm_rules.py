"""Merged, batched and re-associated matrix products: the same numbers as the single products, and
only where that can pay.
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

from tests.graph.rewrite.helpers import capture, close_to_float64, ops, run
from tests.graph.rewrite.test_reduction_rules import draw
from torch_cudal1.graph.rewrite import rewrite
from torch_cudal1.graph.rewrite.gemm_rules import GEMM_RULES

Fn = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]


def attention(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    q, k, v = (F.linear(x, w).view(*x.shape[:2], -1, 4).transpose(1, 2) for w in weights)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def gates(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    half = len(parameters) // 2
    return tuple(
        torch.sigmoid(F.linear(x, w, b))
        for w, b in zip(parameters[:half], parameters[half:], strict=True)
    )


MERGED: list[tuple[str, Fn, Shapes, str]] = [
    ("q, k, v", attention, ((2, 65, 8), (8, 8), (8, 8), (8, 8)), "bmm.default"),
    ("q, k, v of two widths", attention, ((2, 65, 8), (16, 8), (8, 8), (8, 8)), "mm.default"),
    ("gates", gates, ((130, 7), (6, 7), (6, 7), (6, 7), (6,), (6,), (6,)), "baddbmm.default"),
    ("gates of two widths", gates, ((130, 7), (9, 7), (6, 7), (9,), (6,)), "addmm.default"),
    (
        "plain factors",
        lambda x, a, b: ((x @ a).relu(), (x @ b).relu()),
        ((130, 7), (7, 5), (7, 6)),
        "mm.default",
    ),
    (
        "outputs themselves",
        lambda x, a, b: (x @ a, x @ b),
        ((130, 7), (7, 6), (7, 6)),
        "bmm.default",
    ),
]


@pytest.mark.parametrize(
    ("fn", "shapes", "op"), [case[1:] for case in MERGED], ids=[case[0] for case in MERGED]
)
def test_siblings_become_one_product(fn: Fn, shapes: Shapes, op: str) -> None:
    rewritten = rewrite(capture(fn, *draw(*shapes)), GEMM_RULES, assume_finite=False)
    assert rewritten.sites == {"sibling_gemm_merge": 1}
    assert {name: count for name, count in ops(rewritten.gm).items() if "mm" in name} == {op: 1}
    close_to_float64(rewritten.gm, fn, *draw(*shapes, seed=1))


@pytest.mark.parametrize(
    ("fn", "shapes", "op"), [case[1:] for case in MERGED[2:]], ids=[case[0] for case in MERGED[2:]]
)
def test_merged_siblings_keep_nan_and_infinity_in_place(fn: Fn, shapes: Shapes, op: str) -> None:
    gm = rewrite(capture(fn, *draw(*shapes)), GEMM_RULES, assume_finite=False).gm
    for place in range(len(shapes)):
        for value in (math.nan, math.inf, -math.inf):
            inputs = draw(*shapes, seed=2)
            inputs[place].view(-1)[3] = value
            close_to_float64(gm, fn, *inputs)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(90, 140),
    k=st.integers(1, 20),
    widths=st.lists(st.integers(1, 8), min_size=2, max_size=4),
    seed=st.integers(0, 99),
)
def test_any_widths_stay_near_float64(rows: int, k: int, widths: list[int], seed: int) -> None:
    fn: Fn = lambda x, *weights: tuple(F.linear(x, w).sigmoid() for w in weights)
    inputs = draw((rows, k), *((n, k) for n in widths), seed=seed)
    rewritten = rewrite(capture(fn, *inputs), GEMM_RULES, assume_finite=False)
    close_to_float64(rewritten.gm, fn, *inputs, slack=8)


SMALL: list[tuple[str, Fn, Shapes, str]] = [
    (
        "all different",
        lambda *t: [a @ b for a, b in zip(t[::2], t[1::2], strict=True)],
        ((5, 6), (6, 7)) * 5,
        "bmm.default",
    ),
    (
        "one layer on many pieces",
        lambda w, *t: torch.cat([F.linear(x, w) for x in t]),
        ((7, 6), *((5, 6),) * 4),
        "mm.default",
    ),
    (
        "a factor used by several",
        lambda a, b, *t: [a @ b, *(a @ x for x in t), t[0] @ b],
        ((6, 6),) * 5,
        "bmm.default",
    ),
]


@pytest.mark.parametrize(
    ("fn", "shapes", "op"), [case[1:] for case in SMALL], ids=[case[0] for case in SMALL]
)
def test_small_products_become_one_batch(fn: Fn, shapes: Shapes, op: str) -> None:
    rewritten = rewrite(capture(fn, *draw(*shapes)), GEMM_RULES, assume_finite=False)
    assert rewritten.sites == {"small_gemm_batch": 1}
    assert {name: count for name, count in ops(rewritten.gm).items() if "mm" in name} == {op: 1}
    for value in (0.5, math.nan, math.inf):
        inputs = draw(*shapes, seed=1)
        inputs[1].view(-1)[4] = value
        close_to_float64(rewritten.gm, fn, *inputs)


CHAINS: list[tuple[str, Fn, Shapes]] = [
    ("a vector at the end", lambda a, b, v: (a @ b) @ v, ((70, 40), (40, 90), (90,))),
    ("a thin last factor", lambda a, b, c: (a @ b) @ c, ((70, 40), (40, 90), (90, 3))),
    ("a thin first factor", lambda a, b, c: a @ (b @ c), ((3, 40), (40, 90), (90, 30))),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in CHAINS], ids=[case[0] for case in CHAINS]
)
def test_a_chain_is_multiplied_in_the_cheaper_order_for_finite_values(
    fn: Fn, shapes: Shapes
) -> None:
    gm = capture(fn, *draw(*shapes))
    assert rewrite(gm, GEMM_RULES, assume_finite=False).sites == {}
    rewritten = rewrite(gm, GEMM_RULES, assume_finite=True)
    assert rewritten.sites == {"gemm_reassociation": 1}
    close_to_float64(rewritten.gm, fn, *draw(*shapes, seed=1))


def test_a_chain_is_finite_only_because_an_infinity_tells_the_orders_apart() -> None:
    fn: Fn = CHAINS[0][1]
    a, b, v = draw(*CHAINS[0][2])
    gm = rewrite(capture(fn, a, b, v), GEMM_RULES, assume_finite=True).gm
    v[7] = math.inf
    assert fn(a, b, v).isinf().all()
    assert run(gm, a, b, v)[0].isnan().all()


def recurrent(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = torch.tanh(x @ w)
    return x


LEFT_ALONE: list[tuple[str, Fn, Shapes]] = [
    ("too few rows for the copy of the weights", attention, ((1, 5, 8), (8, 8), (8, 8), (8, 8))),
    (
        "one needs the other",
        lambda x, a, b: (y := x @ a, (x + y[:, :7]) @ b),
        ((130, 7), (7, 8), (7, 8)),
    ),
    (
        "the later weight comes from the first product",
        lambda x, a: x @ (x @ a)[:7],
        ((130, 7), (7, 7)),
    ),
    (
        "different left factors",
        lambda x, y, a, b: (x @ a, y @ b),
        ((130, 7), (130, 7), (7, 8), (7, 8)),
    ),
    ("a chain through one weight", recurrent, ((5, 6), (6, 6))),
    (
        "three small ones",
        lambda *t: [a @ b for a, b in zip(t[::2], t[1::2], strict=True)],
        ((5, 6), (6, 7)) * 3,
    ),
    (
        "four large ones",
        lambda *t: [a @ b for a, b in zip(t[::2], t[1::2], strict=True)],
        ((130, 130), (130, 130)) * 4,
    ),
    (
        "the inner product is used elsewhere",
        lambda a, b, v: ((y := a @ b) @ v, y),
        ((70, 40), (40, 90), (90,)),
    ),
    ("the given order is the cheap one", lambda a, b, v: a @ (b @ v), ((70, 40), (40, 90), (90,))),
    (
        "a view that strided columns do not have",
        lambda x, a, b: ((x @ a).view(-1).relu(), (x @ b).view(-1).relu()),
        ((130, 7), (7, 5), (7, 6)),
    ),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in LEFT_ALONE], ids=[case[0] for case in LEFT_ALONE]
)
def test_what_is_not_valid_or_not_cheaper_is_left_alone(fn: Fn, shapes: Shapes) -> None:
    assert rewrite(capture(fn, *draw(*shapes)), GEMM_RULES, assume_finite=True).sites == {}


def test_integer_products_are_left_alone() -> None:
    inputs = [
        torch.ones(130, 6, dtype=torch.int64),
        *(torch.ones(6, 6, dtype=torch.int64) for _ in range(4)),
    ]
    assert (
        rewrite(
            capture(lambda x, *w: [x @ weight for weight in w], *inputs),
            GEMM_RULES,
            assume_finite=True,
        ).sites
        == {}
    )
