"""Bounds hold for whatever the inputs are, in the arithmetic of the dtype, NaN included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cudal1.graph.rewrite.bounds import Bounds, compute_bounds
from torch_cudal1.graph.rewrite.constant_rules import CONSTANT_RULES as RULES

from .helpers import capture, check_exact, ops

NAN, INF = float("nan"), float("inf")
X = torch.tensor([[0.5, -2.0, 3.0], [1e-30, -0.0, 7.0]])
ODD = torch.tensor([[NAN, INF, -INF], [0.0, -0.0, 1e38]])

# a limit that never bites, for every input; and the op that goes
NEVER_BITES: list[tuple[Any, str]] = [
    (lambda x: torch.relu(torch.sigmoid(x)), "relu.default"),
    (lambda x: torch.clamp(torch.tanh(x), -1, 1), "clamp.default"),
    (lambda x: torch.minimum(torch.sigmoid(x), torch.tensor(2.0)), "minimum.default"),
    (lambda x: torch.relu(torch.exp(x) + 1), "relu.default"),
    (lambda x: torch.clamp(torch.softmax(x, 1) * 2 - 1, -1, 1), "clamp.default"),
    (lambda x: torch.clamp_min(torch.abs(x), -3.0), "clamp_min.default"),
    (lambda x: F.hardtanh(torch.cat([torch.tanh(x), torch.sigmoid(x)])), "hardtanh.default"),
    (lambda x: torch.relu(torch.relu(x).sum(1)), ""),
    (lambda x: torch.relu(x * x), "relu.default"),
    (lambda x: torch.clamp(torch.sigmoid(x).max(1).values, 0, 1), "clamp.default"),
]


@pytest.mark.parametrize(("fn", "removed_op"), NEVER_BITES)
@pytest.mark.parametrize("x", [X, ODD])
def test_a_limit_that_never_bites_goes(fn: Any, removed_op: str, x: torch.Tensor) -> None:
    out = check_exact(RULES, fn, x)
    assert out.techniques == ("bound_that_never_bites",)
    assert not ops(out.gm)[removed_op]


STEPS: dict[str, Any] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "exp": torch.exp,
    "abs": torch.abs,
    "neg": lambda x: -x,
    "*0.3": lambda x: x * 0.3,
    "*-2": lambda x: x * -2,
    "+0.1": lambda x: x + 0.1,
    "-1": lambda x: x - 1,
    "/3": lambda x: x / 3,
    "square": lambda x: x * x,
    "clamp": lambda x: torch.clamp(x, -0.7, 0.9),
    "clamp2": lambda x: torch.clamp(x, 0.0, 0.3),
    "max": lambda x: torch.maximum(x, torch.tensor(0.9)),
    "min": lambda x: torch.minimum(x, torch.tensor(0.1)),
    "tril": torch.tril,
    "gt": lambda x: (x > 0.25).to(x.dtype),
    "half": lambda x: x.half().float(),
    "softmax": lambda x: torch.softmax(x, 1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "sub": lambda x: x - x,
}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6), st.booleans())
def test_bounds_hold_on_any_chain(chain: list[str], odd: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for name in chain:
            x = STEPS[name](x)
        return x

    x = ODD if odd else torch.randn(4, 3) * 3
    check_exact(RULES, fn, x)


# function, and the bounds of its result for every float32 input
RESULTS: list[tuple[Any, Bounds]] = [
    (torch.relu, Bounds(0.0, INF, True)),
    (lambda x: torch.clamp(torch.tanh(x), max=0.5), Bounds(-1.0, 0.5, True)),
    (lambda x: x > 0, Bounds(0, 1, False)),
    (lambda x: (x > 0).float() * -2, Bounds(-2.0, 0.0, False)),
    (lambda x: torch.sin(x), Bounds(-1.0, 1.0, True)),
    (lambda x: x * x, Bounds(0.0, INF, True)),
    (lambda x: torch.full((2, 3), 0.1).half(), Bounds(0.0999755859375, 0.0999755859375, False)),
    (lambda x: torch.cumsum(torch.relu(x), 0), Bounds(-INF, INF, True)),
]


@pytest.mark.parametrize(("fn", "expected"), RESULTS)
def test_the_result_of_a_graph_has_bounds_for_every_input(fn: Any, expected: Bounds) -> None:
    gm = capture(fn, X)
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    assert compute_bounds(gm.graph)[output.args[0][0]] == expected


def test_only_a_finite_single_value_is_a_point() -> None:
    assert Bounds(2.0, 2.0, True).point == 2.0
    assert Bounds(INF, INF, False).point is None
    assert Bounds(1.0, 2.0, False).point is None
    assert not Bounds(2.0, 2.0, True).finite
    assert not Bounds(0.0, INF, False).finite
