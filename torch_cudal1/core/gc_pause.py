"""Pauses Python's cyclic garbage collector while a process imports or traces a lot.

A start imports a thousand modules and traces a model: hundreds of thousands of objects that stay,
through which the collector would walk again and again. For BERT-base on a warm cache a start took
2.5 CPU seconds with the collector and 2.0 without (benchmarks/LOG.md, 2026-11-22). Garbage of that
time is collected afterwards, so this is for work of seconds, never for a search.
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
# Blocks that are open in all threads: the collector is one for the whole process.
_inside = 0
# Whether the collector was on when the first of them opened. A user's own gc.disable() stays.
_resumes = False


class pause_gc(ContextDecorator):
    """`with pause_gc():`, or as a decorator: no automatic collection until the last open block
    ends.

    A collector that is already off stays off. `keeps`: objects of the block stay for good, as
    modules do, so they join the oldest generation at once. Do not set it where objects may become
    garbage, which would then be collected late.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps

    def __enter__(self) -> None:
        global _inside, _resumes
        # Here and not at import, which must change nothing in the process.
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
            # A child that was forked inside a block begins at 0 and leaves the block as well.
            _inside = max(0, _inside - 1)
            if _inside == 0 and _resumes:
                # Objects that a user has frozen must stay frozen, and unfreeze() takes all.
                if self._keeps and not gc.get_freeze_count():
                    # Both together move every object into the oldest generation without a walk.
                    # Else the first collection would walk through everything that was imported.
                    gc.freeze()
                    gc.unfreeze()
                gc.enable()


@cache
def _register_fork_handler() -> None:
    os.register_at_fork(after_in_child=_reset_in_child)


def _reset_in_child() -> None:
    """Let a forked child collect, whatever blocks its parent had open."""
    global _lock, _inside
    # The threads with open blocks do not exist in the child. Nor does the thread that may have held
    # the lock, so the old lock could stay locked for ever.
    _lock = threading.Lock()
    if _inside and _resumes:
        gc.enable()
    _inside = 0
