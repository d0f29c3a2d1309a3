"""Every child of the judge forked from one process that has done the imports: tests of hundreds of candidates take minutes less.

The tests of the sandbox itself do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torch_cudal1.judge import sandbox
from torch_cudal1.judge.nursery import Nursery

__all__ = ["forked_children"]


@contextmanager
def forked_children() -> Iterator[None]:
    """Every child that is started within the block is forked. Linux ends the nursery's children with it."""
    with Nursery() as nursery, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "launch", nursery.launch)
        yield
