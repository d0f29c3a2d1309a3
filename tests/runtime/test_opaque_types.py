"""What a guard compares by identity alone cannot change in a way that a call would see."""

from __future__ import annotations

import collections
import enum
import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_cudal1.runtime.opaque_types import OPAQUE_TYPES


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        1,
        1.5,
        "text",
        b"bytes",
        ...,
        Colour.RED,
        Path("x"),
        re.compile("x"),
        torch.float32,
        torch.device("cpu"),
        torch.Size([2]),
        torch.ops.aten.add.Tensor,
        nn.Linear,
        torch,
    ],
    ids=str,
)
def test_what_cannot_change_is_opaque(value: object) -> None:
    assert isinstance(value, OPAQUE_TYPES)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        set(),
        bytearray(),
        collections.deque(),
        types.SimpleNamespace(),
        torch.ones(1),
        nn.ReLU(),
        lambda: None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_change_in_place_is_not(value: object) -> None:
    assert not isinstance(value, OPAQUE_TYPES)
