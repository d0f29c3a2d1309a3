"""Python's cyclic garbage collector, paused while much is imported or traced.

A start imports a thousand modules and traces a model: hundreds of thousands of objects that stay,
which the collector would walk through again and again. What is garbage meanwhile is collected
afterwards, so this is for work of seconds, never for a search. It pauses nothing else and collects
nothing itself.
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
_inside = 0  # how many threads and levels are inside
_resumes = False  # whether the collector was on when the first of them came


class pause_gc(ContextDecorator):
    """`with pause_gc():`, or as a decorator: no automatic collection until the last one
    inside has left.

    A collector that is off already stays off. `keeps`: what was made meanwhile stays for good, as
    modules do, so it is counted as old at once, and not walked through as young. (Never so with
    what may be garbage: nothing would hurry to collect it.)
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps

    def __enter__(self) -> None:
        global _inside, _resumes
        _also_in_forked_children()
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
def _also_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_alone)


def _alone() -> None:
    """In a child: the threads that were inside are not here, nor is whoever held the lock."""
    global _lock, _inside
    _lock = threading.Lock()
    if _inside and _resumes:
        gc.enable()
    _inside = 0
