"""An empty session of the worker in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.judge.worker.sessions import CPU
from torch_cudal1.judge.worker.session import Session


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(CPU, tmp_path)
