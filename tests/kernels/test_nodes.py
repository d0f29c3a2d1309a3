"""Expressions: what they share stays shared, and variants are chosen once for all."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.nodes import (
    Leaf,
    Map,
    OnlineVariant,
    broadcast,
    choose_variants,
    constant,
    find_nodes,
    pointwise,
    reduce,
    substitute,
)

LEAF = Leaf((4, 8), torch.float32, 0, (8, 1))


def test_a_node_used_twice_is_found_once() -> None:
    both = pointwise("({0} + {1})", LEAF, LEAF, dtype=torch.float32)
    assert find_nodes(Leaf, (both, both)) == [LEAF]


def test_substitution_keeps_what_did_not_change_below() -> None:
    total = reduce("sum", LEAF, (1,))
    node = pointwise("({0} - {1})", LEAF, total, dtype=torch.float32)
    other = Leaf((4, 1), torch.float32, 1, (1, 1))
    assert find_nodes(Leaf, (substitute(node, {total: other}),)) != [LEAF]
    assert substitute(LEAF, {total: other}) is LEAF


def test_one_variant_is_chosen_and_shared() -> None:
    two_pass, online = reduce("sum", LEAF, (1,)), reduce("mean", LEAF, (1,))
    node = OnlineVariant((4, 1), torch.float32, two_pass, online)
    pair = (pointwise("({0})", node, dtype=torch.float32), node)
    first, second = choose_variants(pair, online=True)
    assert isinstance(first, Map)
    assert first.args[0] is second
    assert second.kind == "mean"
    assert choose_variants((node,), online=False)[0] is two_pass


def test_shapes_that_do_not_broadcast_are_refused() -> None:
    with pytest.raises(NotLowerableError, match="broadcast"):
        broadcast(LEAF, (4, 9))


@pytest.mark.parametrize(
    ("value", "text"), [(0.1, "0.10000000149011612"), (1e39, 'float("inf")'), (2, "2.0")]
)
def test_a_number_is_rounded_to_fp32_first(value: float, text: str) -> None:
    assert text in constant(value, torch.float32).text
