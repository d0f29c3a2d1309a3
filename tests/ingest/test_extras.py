"""A library of an extra that is not installed is named."""

from __future__ import annotations

import json
import sys
import types

import pytest

from torch_cudal1.ingest.llm.extras import MissingExtraError, require_extra


def test_a_library_that_is_there_is_returned() -> None:
    assert require_extra("json") is json


def test_a_missing_library_is_named_with_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"'no_such_library'.*\[train\]") as caught:
        require_extra("no_such_library")
    assert caught.value.library == "no_such_library"


def test_a_module_missing_inside_a_library_is_not_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "half_there", types.ModuleType("half_there"))
    with pytest.raises(ModuleNotFoundError, match="half_there"):
        require_extra("half_there.inside")
