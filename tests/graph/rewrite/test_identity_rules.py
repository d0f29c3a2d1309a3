"""Each identity rule removes what it names, keeps every bit (NaN, infinity and the sign of zero
included), and knows its limits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cudal1.graph.rewrite import rewrite
from torch_cudal1.graph.rewrite.identity_rules import IDENTITY_RULES as RULES

from .helpers import (
    INF,
    INTS,
    NAN,
    ODD,
    capture,
    check_exact,
    check_removal,
    check_untouched,
    ops,
    run,
    same,
)

aten = torch.ops.aten
BOOLS = torch.tensor([[True, False, True]])
ONE = torch.tensor([[2.0], [NAN], [-INF], [0.5]])

# technique, function, input, op that is gone afterwards
FIRES: list[tuple[str, Any, torch.Tensor, str]] = [
    ("no_op_arithmetic", lambda x: torch.relu(x * 1), ODD, "mul.Tensor"),
    ("no_op_arithmetic", lambda x: torch.relu(1.0 * x), ODD, "mul.Tensor"),
    ("no_op_arithmetic", lambda x: torch.relu(x / 1), ODD, "div.Tensor"),
    ("no_op_arithmetic", lambda x: torch.relu(x**1), ODD, "pow.Tensor_Scalar"),
    ("no_op_arithmetic", lambda x: torch.relu(x - 0), ODD, "sub.Tensor"),
    ("no_op_arithmetic", lambda x: torch.abs(x + 0), INTS, "add.Tensor"),
    ("no_op_arithmetic", lambda x: torch.relu(x) * 1, ODD, "mul.Tensor"),
    ("no_op_arithmetic", lambda x: torch.relu(x) * torch.tensor(1.0), ODD, "mul.Tensor"),
    ("double_inverse", lambda x: torch.exp(torch.neg(torch.neg(x))), ODD, "neg.default"),
    ("double_inverse", lambda x: torch.abs(torch.neg(torch.neg(x))), INTS, "neg.default"),
    ("double_inverse", lambda x: ~(~x) & x, BOOLS, "bitwise_not.default"),
    (
        "double_inverse",
        lambda x: torch.logical_not(torch.logical_not(x)) & x,
        BOOLS,
        "logical_not.default",
    ),
    ("repeated", lambda x: torch.relu(torch.relu(x)), ODD, ""),
    ("repeated", lambda x: torch.floor(torch.floor(x)), ODD, ""),
    ("repeated", lambda x: torch.tril(torch.tril(x, 1), 1), ODD, ""),
    ("trivial_cat", lambda x: torch.relu(torch.cat([x])), ODD, "cat.default"),
    ("trivial_cat", lambda x: torch.cat([x, x[:0], x]), ODD, "slice.Tensor"),
    ("reduction_of_one", lambda x: x - x.mean(1, keepdim=True), ONE, "mean.dim"),
    ("reduction_of_one", lambda x: x.sum(1), ONE, "sum.dim_IntList"),
    (
        "reduction_of_one",
        lambda x: x.sum((0, 2), keepdim=True),
        ODD.unsqueeze(0).unsqueeze(2),
        "sum.dim_IntList",
    ),
    ("reduction_of_one", lambda x: torch.logsumexp(x, 1), ONE, "logsumexp.default"),
    ("reduction_of_one", lambda x: x.amax(1) + 1, ONE, "amax.default"),
    ("reduction_of_one", lambda x: x.max(1).values, ONE, "max.dim"),
    ("reduction_of_one", lambda x: x.min(1, keepdim=True).values * 2, ONE, "min.dim"),
    ("reduction_of_one", lambda x: x.prod(1), ONE, "prod.dim_int"),
    ("common_subexpression", lambda x: torch.exp(x) + torch.exp(x), ODD, ""),
]

# function, input: no rule may fire
STAYS: list[tuple[Any, torch.Tensor]] = [
    (lambda x: torch.reciprocal(x + 0), ODD),  # -0.0 + 0 is +0.0
    (lambda x: torch.reciprocal(x - (-0.0)), ODD),
    (lambda x: torch.abs(x * 1.0), INTS),  # the product is float
    (lambda x: torch.abs(x / 1), INTS),
    (lambda x: x * torch.ones(1, 1, 1), ODD[0, 0]),
    (lambda x: x * 1, ODD),
    (lambda x: torch.logical_not(torch.logical_not(x)), ODD),
    (lambda x: torch.tril(torch.tril(x, 1), 0), ODD),
    (lambda x: torch.relu(torch.abs(x)), ODD),
    (lambda x: x.sum(1), ODD),
    (lambda x: torch.rand_like(x) + torch.rand_like(x), ODD),
    (lambda x: (torch.exp(x), torch.exp(x)), ODD),
    (lambda x: x * 2.0 + x.mul(torch.tensor(3.0)), ODD),
    (lambda x: (x == 1).to(x.dtype) * 3, ODD),
    (lambda x: x.max(1).indices, ONE),
]


@pytest.mark.parametrize(("technique", "fn", "x", "removed_op"), FIRES)
def test_rule_fires_and_keeps_every_bit(
    technique: str, fn: Any, x: torch.Tensor, removed_op: str
) -> None:
    check_removal(RULES, technique, fn, x, removed_op)


@pytest.mark.parametrize(("fn", "x"), STAYS)
def test_no_rule_fires_where_its_condition_fails(fn: Any, x: torch.Tensor) -> None:
    check_untouched(RULES, fn, x)


def test_calls_that_nobody_uses_go() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(3))
    x, relu = list(gm.graph.nodes)[:2]
    with gm.graph.inserting_before(relu):
        gm.graph.call_function(aten.exp.default, (gm.graph.call_function(aten.neg.default, (x,)),))
    out = rewrite(gm, RULES, assume_finite=False)
    assert ops(out.gm) == {"relu.default": 1}
    assert out.sites == {"dead_code": 2}


def test_adding_zero_goes_only_with_finite_values() -> None:
    out = check_exact(RULES, lambda x: torch.exp(x + 0), torch.randn(4), finite=True)
    assert out.techniques == ("add_zero",)


def test_a_mutated_input_is_still_written() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(3))
    x = next(iter(gm.graph.nodes))
    output = list(gm.graph.nodes)[-1]
    with gm.graph.inserting_before(output):
        gm.graph.call_function(aten.copy_.default, (x, output.args[0][0]))
    out = rewrite(gm, RULES, assume_finite=False)
    assert ops(out.gm)["copy_.default"] == 1


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["*1", "-0", "neg", "relu", "clamp", "t", "clone", "double", "abs", "tril", "cat"]
        ),
        min_size=1,
        max_size=7,
    )
)
def test_any_chain_of_no_ops_keeps_every_bit(chain: list[str]) -> None:
    step = {
        "*1": lambda x: x * 1,
        "-0": lambda x: x - 0,
        "neg": lambda x: -x,
        "relu": torch.relu,
        "clamp": lambda x: x.clamp(-1, 2.5),
        "t": lambda x: x.t(),
        "clone": lambda x: x.clone(),
        "double": lambda x: x.double().float(),
        "abs": torch.abs,
        "tril": torch.tril,
        "cat": lambda x: torch.cat([x]),
    }

    def fn(x: torch.Tensor) -> torch.Tensor:
        for name in chain:
            x = step[name](x)
        return x

    gm = capture(fn, ODD)
    out = rewrite(gm, RULES, assume_finite=False)
    assert sum(ops(out.gm).values()) <= sum(ops(gm).values())
    same(run(out.gm, ODD), run(gm, ODD))
