"""Candidates may call functional operators; not those that draw, write or read unwritten memory."""

from __future__ import annotations

import pytest

from torch_cudal1.judge.checks.static.allowed_operators import is_allowed


@pytest.mark.parametrize(
    "target",
    ["aten.add.Tensor", "aten.mm.default", "aten.tril.default", "prims.broadcast_in_dim.default"],
)
def test_functional_operators_are(target: str) -> None:
    assert is_allowed(target)


@pytest.mark.parametrize(
    "target", ["aten.empty.memory_format", "aten._local_scalar_dense.default", "aten.copy_.default"]
)
def test_fresh_memory_reads_by_the_host_and_writes_are_not(target: str) -> None:
    assert not is_allowed(target)
