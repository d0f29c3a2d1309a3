"""PyTorch has every fused attention operator under the name that is listed."""

from __future__ import annotations

import pytest

from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.ops.attention_names import BACKWARDS, FORWARDS, FORWARDS_ELSEWHERE, targets


@pytest.mark.parametrize("name", [*FORWARDS, *BACKWARDS, *FORWARDS_ELSEWHERE])
def test_the_operator_exists(name: str) -> None:
    (target,) = targets((name,))
    assert overload(target)._schema.name == f"aten::{name}"
