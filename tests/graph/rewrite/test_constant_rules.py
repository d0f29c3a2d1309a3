"""What is constant is folded, exactly where NaN allows it; what only looks constant is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cudal1.graph.rewrite import rewrite
from torch_cudal1.graph.rewrite.constant_rules import CONSTANT_RULES as RULES
from torch_cudal1.graph.rewrite.identity_rules import IDENTITY_RULES as CLEAN

from .helpers import capture, check_exact, close_to_float64, ops, run

NAN, INF = float("nan"), float("inf")
X = torch.tensor([[0.5, -2.0, 3.0], [1e-30, -0.0, 7.0]])
ODD = torch.tensor([[NAN, INF, -INF], [0.0, -0.0, 1e38]])
COLUMN = torch.tensor([[0.5], [-3.0], [9.0]])
FACTORIES = {"full.default"}

# constant for every input, NaN and infinity included
ALWAYS: list[Any] = [
    lambda x: torch.exp(torch.zeros(2, 3)) * 3,
    lambda x: torch.sigmoid(x) > 2,
    lambda x: torch.relu(x) < 0,
    lambda x: torch.clamp((torch.relu(x) >= 0.0).float(), 2, 3),
    lambda x: torch.zeros(2, 3).expand(4, 2, 3).sum(0) * 2,
    lambda x: torch.where(x > 0, 2.0, torch.full((), 2.0)),
    lambda x: torch.cat([torch.zeros(2), torch.zeros(3)]),
    lambda x: torch.minimum((x > 0).double(), torch.zeros((), dtype=torch.float64)),
    lambda x: (torch.zeros(2, 3).t() + 1).contiguous(),
]
# constant for finite inputs only
FINITE: list[tuple[Any, torch.Tensor]] = [
    (lambda x: x * 0, X),
    (lambda x: x - x, X),
    (lambda x: torch.softmax(x, 1), COLUMN),
    (lambda x: torch.log_softmax(x, 1), COLUMN),
    (lambda x: torch.clamp(torch.min(x, torch.tensor(0.0)), min=0.0, max=1.0), X),
    (lambda x: torch.clamp(torch.relu(x), max=0.0) + 1, X),
    (lambda x: F.gelu((m := x.max(1, keepdim=True).values) - m.mean(1, keepdim=True)), X),
    (lambda x: F.dropout(torch.clamp(x, 1, 1), 0.5, training=False), X),
    (lambda x: torch.clamp(torch.sigmoid(x), 2, 3), X),
    (lambda x: F.hardtanh(torch.exp(x), -2.0, 0.0) * 5, X),
]
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
# function, whether `assume_finite` is given: nothing may change
STAYS: list[tuple[Any, torch.Tensor]] = [
    (lambda x: torch.relu(torch.tanh(x)), X),
    (lambda x: torch.clamp(torch.sigmoid(x) * 0.3, max=0.29), X),
    (lambda x: torch.clamp(torch.sigmoid(x) / 3, max=1 / 3), X),  # division may round up
    (lambda x: torch.softmax(x, 0), X),
    (lambda x: torch.clamp(torch.min(x, torch.tensor(0.5)), 0, 1), X),
    (lambda x: x - x.t().t().clone().exp(), X),
    (lambda x: torch.clamp(x, 0, 1), X),
    (lambda x: torch.sigmoid(x) > 0.5, X),
    (lambda x: (x > 3).int().sum(0), X),
    (lambda x: torch.clamp(torch.rand_like(x), 0, 2), X),
    (lambda x: torch.relu(x), X.to(torch.int32)),
    (lambda x: torch.relu((x > 3).int().sum(0) - 9), X),
]


@pytest.mark.parametrize("fn", ALWAYS)
@pytest.mark.parametrize("x", [X, ODD])
def test_what_is_always_constant_is_folded(fn: Any, x: torch.Tensor) -> None:
    out = check_exact((*CLEAN, *RULES), fn, x)
    assert "constant_value" in out.techniques
    assert set(ops(out.gm)) <= FACTORIES | {"clone.default", "permute.default"}


@pytest.mark.parametrize(("fn", "x"), FINITE)
def test_what_nan_would_spoil_is_folded_only_for_finite_values(fn: Any, x: torch.Tensor) -> None:
    out = check_exact((*CLEAN, *RULES), fn, x, finite=True)
    assert "constant_value_finite" in out.techniques
    assert set(ops(out.gm)) <= FACTORIES
    spoilt = torch.full_like(x, NAN)
    kept = check_exact((*CLEAN, *RULES), fn, spoilt)
    assert not {"constant_value", "constant_value_finite"} & set(kept.techniques)
    assert run(kept.gm, spoilt)[0].isnan().all()


@pytest.mark.parametrize(("fn", "gone"), NEVER_BITES)
@pytest.mark.parametrize("x", [X, ODD])
def test_a_limit_that_never_bites_goes(fn: Any, gone: str, x: torch.Tensor) -> None:
    out = check_exact(RULES, fn, x)
    assert out.techniques == ("bound_that_never_bites",)
    assert not ops(out.gm)[gone]


@pytest.mark.parametrize(("fn", "x"), STAYS)
def test_what_only_looks_constant_stays(fn: Any, x: torch.Tensor) -> None:
    gm = capture(fn, x)
    out = rewrite(gm, RULES, assume_finite=True)
    assert out.techniques == ()
    assert ops(out.gm) == ops(gm)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["layer", "group"])
def test_a_norm_of_one_element_is_its_bias(kind: str, affine: bool) -> None:
    x, w, b = (
        torch.randn(2, 4, 1),
        torch.randn(1 if kind == "layer" else 4),
        torch.randn(1 if kind == "layer" else 4),
    )

    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        weight, bias = (w, b) if affine else (None, None)
        return (
            F.layer_norm(x, (1,), weight, bias)
            if kind == "layer"
            else F.group_norm(x, 4, weight, bias)
        )

    gm = capture(fn, x, w, b)
    assert rewrite(gm, RULES, assume_finite=False).techniques == ()
    out = rewrite(gm, RULES, assume_finite=True)
    assert "norm_of_one" in out.techniques
    close_to_float64(out.gm, fn, x, w, b)


def test_a_norm_of_two_elements_or_without_eps_stays() -> None:
    gm = capture(lambda x: F.layer_norm(x, (2,)), torch.randn(3, 2))
    assert rewrite(gm, RULES, assume_finite=True).techniques == ()
    gm = capture(lambda x: F.layer_norm(x, (1,), eps=0.0), torch.randn(3, 1))
    assert rewrite(gm, RULES, assume_finite=True).techniques == ()


def test_dropout_of_a_constant_still_draws() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.clamp(torch.min(x, torch.tensor(0.0)), 0, 1), 0.5, training=True)

    out = rewrite(capture(fn, X), (*CLEAN, *RULES), assume_finite=True)
    assert ops(out.gm)["native_dropout.default"] == 1
    torch.manual_seed(3)
    assert torch.equal(run(out.gm, X)[0], torch.zeros_like(X))
    state = torch.get_rng_state()
    torch.manual_seed(3)
    fn(X)
    assert torch.equal(torch.get_rng_state(), state)


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
