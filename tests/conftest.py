"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.entries import Runs, count_runs
from torch_cudal1 import observe


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Counts the calls that planted Programs serve."""
    return count_runs(monkeypatch)


@pytest.fixture
def clean() -> None:
    """The same numbers in whatever order tests run, and counters at zero."""
    torch.manual_seed(0)
    observe.reset()


@pytest.fixture
def inference(clean: None) -> Iterator[None]:
    """`clean`, without gradients."""
    with torch.no_grad():
        yield


@pytest.fixture
def dynamo(clean: None) -> Iterator[None]:
    """`clean`, with nothing compiled by an earlier test or left to a later one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
