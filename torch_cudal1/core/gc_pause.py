"""Pauses Python's cyclic garbage collector while a process imports or traces much.

A start imports a thousand modules and traces a model: hundreds of thousands of objects that stay,
through which the collector would walk again and again. Garbage of that time is collected
afterwards, so this is for work of seconds, never for a search. It collects nothing itself.
"""

from __future__ import annotations

import gc
import os
import threading
from contextlib import ContextDecorator
from functools import cache
from types import TracebackType

__all__ = ["pause_gc"]

_lock = threading.Lock()
_inside = 0  # blocks that are open, in all threads
_resumes = False  # whether the collector was on when the first of them opened


class pause_gc(ContextDecorator):
    """`with pause_gc():`, or as a decorator: no automatic collection until the last open block
    ends.

    A collector that is off already stays off. `keeps`: objects of the block stay for good, as
    modules do, so they join the oldest generation at once. Not for what may become garbage, which
    would then be collected late.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps

    def __enter__(self) -> None:
        global _inside, _resumes
        _register_fork_handler()
        with _lock:
            if _inside == 0:
                _resumes = gc.isenabled()
                gc.disable()
            _inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _inside
        with _lock:
            _inside = max(0, _inside - 1)  # a child that was forked inside begins at 0
            if _inside == 0 and _resumes:
                if self._keeps and not gc.get_freeze_count():  # what a user has frozen stays so
                    gc.freeze()
                    gc.unfreeze()  # into the oldest generation, without a walk
                gc.enable()


@cache
def _register_fork_handler() -> None:
    os.register_at_fork(after_in_child=_reset_in_child)


def _reset_in_child() -> None:
    """In a child: the threads with open blocks do not exist, nor does the holder of the lock."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside and _resumes:
        gc.enable()
    _inside = 0
