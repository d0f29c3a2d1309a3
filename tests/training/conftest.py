"""Fixtures of the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.training.landscape_cases import naive
from tests.training.stage_cases import start

__all__ = ["naive", "one_thread", "start"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of PyTorch while the test runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
