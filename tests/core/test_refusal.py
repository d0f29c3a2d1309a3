"""A Refusal always says why."""

from __future__ import annotations

import pytest

from torch_cudal1.core.refusal import Refusal


def test_its_text_is_its_reason() -> None:
    assert f"not stored: {Refusal('the disk is full')}" == "not stored: the disk is full"


def test_an_empty_reason_is_no_refusal() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        Refusal("")
