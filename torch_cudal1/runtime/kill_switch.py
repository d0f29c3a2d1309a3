"""The kill switch: inside `disabled()` every call in the process runs the user's own baseline, from
the next call on.

It changes nothing that was built; leaving the block switches everything back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["disabled", "is_disabled"]

_lock = threading.Lock()
# A count, because blocks nest and may overlap between threads. The dispatch table reads it by this
# name from C++.
_depth = 0


@contextmanager
def disabled() -> Iterator[None]:
    """Run the body (and every other thread meanwhile) without any swapped kernel. Blocks may nest."""
    global _depth
    with _lock:
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1


def is_disabled() -> bool:
    """Whether any `disabled()` block is open."""
    # Read without the lock: a call that began before the block is allowed to end with its kernel.
    return _depth > 0
