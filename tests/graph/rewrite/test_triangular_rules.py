"""Panels instead of a whole product: fewer operations, the same values, NaN and infinity spread as
before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from torch_cudal1.graph.rewrite import rewrite, triangular_rules
from torch_cudal1.graph.rewrite.triangular_rules import TRIANGULAR_RULES as RULES

from .helpers import capture, close_to_float64, ops, run

ODD = (float("nan"), float("inf"), -float("inf"), 0.0)

# function, largest share of the operations that may remain (with 4 panels)
PATTERNS: list[tuple[Any, float]] = [
    (lambda a, b: torch.tril(torch.tril(a) @ torch.tril(b)), 0.47),
    (lambda a, b: torch.triu(torch.triu(a) @ torch.triu(b)), 0.47),
    (lambda a, b: torch.tril(a) @ b, 0.63),
    (lambda a, b: torch.triu(a) @ b, 0.63),
    (lambda a, b: a @ torch.tril(b), 0.63),
    (lambda a, b: a @ torch.triu(b), 0.63),
    (lambda a, b: torch.tril(a @ b), 0.63),
    (lambda a, b: torch.triu(a @ torch.triu(b)), 0.47),
    (lambda a, b: torch.tril(a @ torch.triu(b)), 0.63),
    (lambda a, b: torch.tril(a, -1) @ torch.triu(b), 0.63),
    (lambda a, b: torch.tril(a).t() @ b, 0.63),
    (lambda a, b: torch.tril(a @ b) + torch.tril(a @ b), 0.63),
]
OTHERS: list[Any] = [
    lambda a, b: torch.tril(a, 1) @ b,
    lambda a, b: torch.triu(a, -1) @ b,
    lambda a, b: (torch.tril(a) + 1) @ b,
    lambda a, b: (lambda c: (torch.tril(c), c))(a @ b),
    lambda a, b: (lambda c: torch.tril(c) + torch.triu(c))(a @ b),
    lambda a, b: torch.tril(a[:5]) @ b,
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels at test size."""
    monkeypatch.setattr(triangular_rules, "MIN_SIZE", 8)
    monkeypatch.setattr(triangular_rules, "_PANELS", ((32, 8), (8, 4)))


def _flops(gm: Any, *inputs: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        run(gm, *inputs)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("size", [16, 19])
@pytest.mark.parametrize(("fn", "share"), PATTERNS)
def test_panels_do_less_and_compute_the_same(fn: Any, share: float, size: int) -> None:
    inputs = torch.randn(size, size), torch.randn(size, size)
    gm = capture(fn, *inputs)
    out = rewrite(gm, RULES, assume_finite=False)
    assert out.techniques == ("triangular_matmul",)
    assert _flops(out.gm, *inputs) <= (share + (size == 19) * 0.06) * _flops(gm, *inputs)
    close_to_float64(out.gm, fn, *inputs)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_nan_and_infinity_spread_as_in_the_product(data: st.DataObject) -> None:
    triangular_rules.MIN_SIZE, triangular_rules._PANELS = 8, ((32, 8), (8, 4))
    fn, _share = data.draw(st.sampled_from(PATTERNS))
    inputs = torch.randn(9, 9), torch.randn(9, 9)
    for x in inputs:
        for position in data.draw(st.lists(st.integers(0, 80), max_size=3)):
            x.view(-1)[position] = data.draw(st.sampled_from(ODD))
    out = rewrite(capture(fn, *inputs), RULES, assume_finite=False)
    assert out.techniques == ("triangular_matmul",)
    close_to_float64(out.gm, fn, *inputs)


@pytest.mark.parametrize("fn", OTHERS)
def test_what_is_not_triangular_stays(fn: Any) -> None:
    gm = capture(fn, torch.randn(16, 16), torch.randn(16, 16))
    out = rewrite(gm, RULES, assume_finite=True)
    assert out.techniques == ()
    assert ops(out.gm) == ops(gm)


def test_small_products_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gm = capture(lambda a, b: torch.tril(a) @ b, torch.randn(512, 512), torch.randn(512, 512))
    assert rewrite(gm, RULES, assume_finite=False).techniques == ()
