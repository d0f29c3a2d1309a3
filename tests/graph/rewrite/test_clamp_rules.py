"""Two clamps in a row become one where the limits are exact in the dtype; relu and hardtanh are
clamps too.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_cudal1.graph.rewrite.clamp_rules import clamp_limits
from torch_cudal1.graph.rewrite.identity_rules import IDENTITY_RULES as RULES
from torch_cudal1.graph.rewrite.match import iter_calls

from .helpers import ODD, capture, check_removal, check_untouched

NAN, INF = math.nan, math.inf

# technique, function, input, op that is gone afterwards
FIRES: list[tuple[str, Any, torch.Tensor, str]] = [
    ("clamp_of_clamp", lambda x: x.clamp(-2, 3).clamp(-1, 5), ODD, ""),
    ("clamp_of_clamp", lambda x: F.hardtanh(torch.relu(x)), ODD, "hardtanh.default"),
    ("clamp_of_clamp", lambda x: x.clamp(4, 5).clamp(-1, 2), ODD, ""),
    ("clamp_of_clamp", lambda x: x.clamp_min(-1).clamp_max(2), ODD, "clamp_min.default"),
    ("clamp_of_clamp", lambda x: x.clamp(-0.5, 0.25).clamp(0, 8), ODD.bfloat16(), ""),
]
# function, input: no rule may fire
STAYS: list[tuple[Any, torch.Tensor]] = [
    (lambda x: x.clamp(2, 1).clamp(0, 3), ODD),  # limits the wrong way round
    (lambda x: x.clamp(-0.1, 0.1).clamp(-0.05, 8), ODD.half()),  # limits not exact in the dtype
]


@pytest.mark.parametrize(("technique", "fn", "x", "removed_op"), FIRES)
def test_a_rule_fires_and_keeps_every_bit(
    technique: str, fn: Any, x: torch.Tensor, removed_op: str
) -> None:
    check_removal(RULES, technique, fn, x, removed_op)


@pytest.mark.parametrize(("fn", "x"), STAYS)
def test_no_rule_fires_where_its_condition_fails(fn: Any, x: torch.Tensor) -> None:
    check_untouched(RULES, fn, x)


@pytest.mark.parametrize(
    ("fn", "limits"),
    [
        (torch.relu, (0.0, INF)),
        (lambda x: F.hardtanh(x, -2.0, 0.5), (-2.0, 0.5)),
        (lambda x: x.clamp(min=3), (3, INF)),
        (lambda x: x.clamp_max(-1.5), (-INF, -1.5)),
        (lambda x: x.clamp(2, 1), None),
        (lambda x: x.clamp(max=NAN), None),
        (torch.exp, None),
    ],
    ids=["relu", "hardtanh", "one side", "clamp_max", "limits the wrong way round", "NaN", "exp"],
)
def test_the_limits_of_a_clamp_are_infinite_where_it_is_open(
    fn: Any, limits: tuple[float, float] | None
) -> None:
    (node,) = iter_calls(capture(fn, ODD))
    assert clamp_limits(node) == limits


def test_a_clamp_between_tensors_has_no_limits() -> None:
    gm = capture(lambda x, low: torch.clamp(x, low), ODD, torch.tensor(0.5))
    assert [clamp_limits(node) for node in iter_calls(gm)] == [None]
