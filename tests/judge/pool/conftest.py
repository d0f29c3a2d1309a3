"""One slot with a scripted clock for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.judge.pool.scripted_slot import ScriptedClock, make_settings
from torch_cudal1.judge.pool.slot import Slot


@pytest.fixture(autouse=True, scope="module")
def use_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slot]:
    with Slot(make_settings(tmp_path_factory.mktemp("locks")), ScriptedClock()) as running_slot:
        yield running_slot
