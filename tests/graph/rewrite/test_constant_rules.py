"""What is constant is folded, exactly where NaN allows it; what only looks constant is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

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
    out_spoilt = check_exact((*CLEAN, *RULES), fn, spoilt)
    assert not {"constant_value", "constant_value_finite"} & set(out_spoilt.techniques)
    assert run(out_spoilt.gm, spoilt)[0].isnan().all()


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
