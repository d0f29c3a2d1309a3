"""Counts the audit hooks that are added to this interpreter.

A hook sees every import, file and process of the judge's code here, cannot be removed and is listed
nowhere; adding one is an event for those that are there already.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module

__all__ = ["count_added_hooks", "watch"]

_additions: list[None] = []


@cache
def watch() -> None:
    """Count from now on; once in a process."""
    # filelock adds a hook when it is imported, from Python 3.12 on, and Inductor imports it late:
    # a candidate that only calls torch.compile would be refused for it.
    import_module("filelock")
    add = _additions.append

    def count_addition(event: str, arguments: tuple[object, ...]) -> None:
        if event == "sys.addaudithook":
            add(None)

    sys.addaudithook(count_addition)


def count_added_hooks() -> int:
    """How many hooks came since `watch`."""
    return len(_additions)
