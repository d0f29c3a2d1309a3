"""Counts and events of this process, which `cudal1.report()` and `cudal1.explain()` show.

Thread-safe, bounded, in memory; it writes nothing, patches nothing and decides nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Event", "Report", "count", "fallback", "record", "report", "reset"]

log = logging.getLogger("torch_cudal1")

# A long-lived server must not grow: older events are dropped, their counts stay.
_MAX_EVENTS = 4096
# Calls of any thread count and record.
_lock = threading.Lock()
_counters: Counter[str] = Counter()
_events: deque[Event] = deque(maxlen=_MAX_EVENTS)
# Kinds of failures that were logged. A failure in a serving loop comes at every call, and one line
# is enough.
_warned: set[str] = set()


@dataclass(frozen=True)
class Event:
    """What happened to a region: `stage` ("capture", "resolve", "search", "judge", "swap", "run",
    "shadow", "ranks"), `what`, and its facts.
    """

    stage: str
    what: str
    region: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0


@dataclass(frozen=True)
class Report:
    """A snapshot: counters by name ("candidates_built", "misses", "fallbacks", ...) and the latest
    events, oldest first.
    """

    counters: Mapping[str, int]
    events: tuple[Event, ...]

    def __str__(self) -> str:
        lines = [f"{name:28} {value}" for name, value in sorted(self.counters.items())]
        lines += [
            f"[{e.stage}] {e.what} {e.region} {dict(e.facts) or ''}".rstrip() for e in self.events
        ]
        return "\n".join(lines) or "nothing has happened yet"


def count(name: str, by: int = 1) -> None:
    """Add to a counter."""
    with _lock:
        _counters[name] += by


# Positional-only, so that a fact may have any of these names.
def record(stage: str, name: str, region: str = "", /, **facts: Any) -> Event:
    """Keep an event, count it as "stage.name", and return it."""
    event = Event(stage, name, region, facts, time.time())
    with _lock:
        _events.append(event)
        _counters[f"{stage}.{name}"] += 1
    # Outside of the lock, which is not reentrant: a log handler of the user may call this module.
    log.debug("%s: %s %s %s", stage, name, region, facts)
    return event


def fallback(stage: str, error: BaseException, *, strictness: str, region: str = "") -> None:
    """Record a failure of this package at run time, log it once per kind, and re-raise it only
    under strictness "error".
    """
    reason = f"{type(error).__name__}: {error}"
    record(stage, "fallback", region, reason=reason)
    # Counted whatever the strictness: "silent" keeps a failure out of the log, not out of the
    # report.
    count("fallbacks")
    if strictness == "error":
        raise error
    with _lock:
        first = (kind := f"{stage}|{type(error).__name__}") not in _warned
        _warned.add(kind)
    if strictness == "warn" and first:
        log.warning("cudal1 runs the baseline: %s failed (%s); see cudal1.report()", stage, reason)


def report() -> Report:
    """What has happened in this process so far."""
    with _lock:
        # Copies: other threads go on counting.
        return Report(dict(_counters), tuple(_events))


def reset() -> None:
    """Forget counters and events (tests, and the start of a measured section)."""
    with _lock:
        _counters.clear()
        _events.clear()
        _warned.clear()
