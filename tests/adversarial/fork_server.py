"""Every child of the judge forked from one process that has done the imports: tests of hundreds of candidates take minutes less.

The tests of the sandbox itself do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod

import pytest

from torch_cudal1.judge.sandbox.child import Child
from torch_cudal1.judge.sandbox.fork_server import ForkServer

__all__ = ["fork_children"]


@contextmanager
def fork_children() -> Iterator[None]:
    """Every child that is started within the block is forked, unless a tool starts it; none outlives it."""
    with ForkServer() as fork_server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Child, "__init__", partialmethod(Child.__init__, fork_server=fork_server))
        yield
