"""Every child of the judge forked from one process that has done the imports: tests of hundreds of candidates take minutes less.

The tests of the sandbox itself do without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from torch_cudal1.confine.plan import Plan
from torch_cudal1.judge import sandbox
from torch_cudal1.judge.nursery import Nursery

__all__ = ["forked_children"]


@contextmanager
def forked_children() -> Iterator[None]:
    """Every child that is started within the block is forked. Linux ends the nursery's children with it."""
    start = sandbox.launch
    with Nursery() as nursery, pytest.MonkeyPatch.context() as patch:

        def launch(plan: Plan, command: Sequence[str], variables: Mapping[str, str], **files: Any) -> Any:
            under_a_tool = command[0] != sys.executable
            return (start if under_a_tool else nursery.launch)(plan, command, variables, **files)

        patch.setattr(sandbox, "launch", launch)
        yield
