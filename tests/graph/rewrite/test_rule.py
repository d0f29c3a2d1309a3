"""All rules together: no name twice, whole blocks keep their values, and everything that a rule
says of itself is there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_cudal1.graph.rewrite import RULES, Rule, rewrite

from .helpers import capture, capture_module, close_to_float64, ops, run


def test_a_rule_holds_for_every_input_unless_it_says_otherwise() -> None:
    assert not Rule("anything", lambda gm: 0).finite_only


def test_every_rule_has_its_own_name_and_a_docstring() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.rewrite.__doc__ and "->" in rule.rewrite.__doc__ for rule in RULES)


BLOCKS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    (
        nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        (2, 3, 9, 9),
    ),
    (
        nn.Sequential(
            nn.Linear(8, 16),
            nn.Dropout(),
            nn.GroupNorm(4, 16),
            nn.Sigmoid(),
            nn.ReLU(),
            nn.Linear(16, 3),
        ),
        (6, 8),
    ),
]


@pytest.mark.parametrize(("module", "shape"), BLOCKS)
@pytest.mark.parametrize("finite", [False, True])
def test_whole_blocks_keep_their_values(
    module: nn.Module, shape: tuple[int, ...], finite: bool
) -> None:
    gm, flat = capture_module(module.eval(), torch.randn(shape))
    out = rewrite(gm, RULES, assume_finite=finite)
    assert out.techniques
    wide = run(gm, *(x.double() if x.is_floating_point() else x for x in flat))
    for got, base, true in zip(run(out.gm, *flat), run(gm, *flat), wide, strict=True):
        assert got.stride() == base.stride()
        assert (got.double() - true).abs().max() <= 4 * (
            base.double() - true
        ).abs().max() + 1e-5 * true.abs().max()


# KernelBench-like: what must be left of it, with and without finite values
@pytest.mark.parametrize(
    ("fn", "remaining"),
    [
        (
            lambda x, w, b: F.gelu(
                (m := F.linear(x, w, b).max(1, keepdim=True).values) - m.mean(1, keepdim=True)
            ),
            {"full.default": 1},
        ),
        (
            lambda x, w, b: torch.clamp(torch.min(F.linear(x, w, b), torch.tensor(0.0)), 0.0, 1.0),
            {"full.default": 1},
        ),
    ],
)
def test_a_network_that_ends_in_a_constant_collapses_for_finite_values(
    fn: Any, remaining: dict[str, int]
) -> None:
    inputs = torch.randn(6, 8), torch.randn(5, 8), torch.randn(5)
    gm = capture(fn, *inputs)
    out = rewrite(gm, RULES, assume_finite=True)
    assert ops(out.gm) == remaining
    close_to_float64(out.gm, fn, *inputs)
    spoilt = inputs[0].clone()
    spoilt[2, 3] = float("nan")
    rewritten = rewrite(gm, RULES, assume_finite=False)
    assert run(rewritten.gm, spoilt, *inputs[1:])[0][2].isnan().all()
