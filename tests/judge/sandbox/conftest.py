"""A scratch folder for processes that tests of the sandbox start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cudal1-test-") as folder:
        yield Path(folder)
