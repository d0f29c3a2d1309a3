"""Fixtures of the guard's tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.guard_cases import NATIVE


@pytest.fixture(params=["python", NATIVE])
def implementation(request: pytest.FixtureRequest) -> Any:
    """Each implementation of the module guard."""
    return request.param
