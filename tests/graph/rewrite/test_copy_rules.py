"""Views, copies and casts that change nothing go, and dropout that is off; what an output or the next
view depends on stays.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torch_cudal1.graph.rewrite import rewrite
from torch_cudal1.graph.rewrite.identity_rules import IDENTITY_RULES as RULES

from .helpers import INTS, ODD, capture, check_exact, check_removal, check_untouched, ops

aten = torch.ops.aten
# technique, function, input, op that is gone afterwards
FIRES: list[tuple[str, Any, torch.Tensor, str]] = [
    ("redundant_view", lambda x: torch.relu(x.t().t()), ODD, "t.default"),
    ("redundant_view", lambda x: torch.relu(x.view(12).view(3, 4)), ODD, "view.default"),
    ("redundant_view", lambda x: torch.relu(x.permute(1, 0).permute(1, 0)), ODD, "permute.default"),
    ("redundant_view", lambda x: torch.relu(x.expand(3, 4)), ODD, "expand.default"),
    ("redundant_view", lambda x: torch.relu(aten.slice.Tensor(x, 0, 0, 3)), ODD, "slice.Tensor"),
    ("redundant_view", lambda x: torch.relu(x.unsqueeze(0).squeeze(0)), ODD, "unsqueeze.default"),
    ("redundant_copy", lambda x: torch.relu(x.clone()), ODD, "clone.default"),
    ("redundant_copy", lambda x: torch.relu(x).clone(), ODD, "clone.default"),
    (
        "redundant_copy",
        lambda x: torch.relu(F.dropout(x, 0.5, training=False)),
        ODD,
        "clone.default",
    ),
    (
        "redundant_copy",
        lambda x: torch.relu(aten._to_copy.default(x, dtype=torch.float32)),
        ODD,
        "_to_copy.default",
    ),
    ("cast_chain", lambda x: torch.relu(x.double().float()), ODD, "_to_copy.default"),
    ("cast_chain", lambda x: x.half().float().half() + 1, ODD.half(), "_to_copy.default"),
]
# function, input: no rule may fire
STAYS: list[tuple[Any, torch.Tensor]] = [
    (lambda x: torch.exp(x.clone()) if x.dim() > 5 else x.clone(), ODD),  # the output must be fresh
    (lambda x: (x.clone().t(), x), ODD),
    (lambda x: torch.relu(x.float().double()), ODD.double()),  # narrowing loses digits
    (lambda x: torch.abs(x.float().int()), INTS.int()),
    (lambda x: torch.relu(x.half().bfloat16().half()), ODD.half()),
    (lambda x: x.t().contiguous().view(12), ODD),  # the copy changes strides
    (lambda x: torch.relu(x[:1, 1:].expand(3, 3)[:2]), ODD),
]


@pytest.mark.parametrize(("technique", "fn", "x", "removed_op"), FIRES)
def test_a_rule_fires_and_keeps_every_bit(
    technique: str, fn: Any, x: torch.Tensor, removed_op: str
) -> None:
    check_removal(RULES, technique, fn, x, removed_op)


@pytest.mark.parametrize(("fn", "x"), STAYS)
def test_no_rule_fires_where_its_condition_fails(fn: Any, x: torch.Tensor) -> None:
    check_untouched(RULES, fn, x)


def test_dropout_that_is_off_gives_its_input_and_a_full_mask() -> None:
    x = torch.randn(3, 4)
    out = check_exact(
        RULES, lambda x: tuple(torch.relu(t) for t in aten.native_dropout(x, 0.5, False)[:1]), x
    )
    assert "dropout_off" in out.techniques
    assert ops(out.gm) == {"relu.default": 1}
    out = check_exact(
        RULES, lambda x: torch.where(aten.native_dropout(x, 0.5, False)[1], x, 0.0), x
    )
    assert not ops(out.gm)["native_dropout.default"]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_that_draws_keeps_drawing(p: float) -> None:
    gm = capture(lambda x: torch.relu(aten.native_dropout(x, p, True)[0]), torch.randn(8))
    out = rewrite(gm, RULES, assume_finite=True)
    assert ops(out.gm)["native_dropout.default"] == 1
