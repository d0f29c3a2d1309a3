"""Work with children in other threads, which ends as soon as nobody waits for it any more: its
children are killed at once.

Without that an interrupted search would end when the last child has imported torch, as an
interpreter joins its threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar

from torch_cudal1.core.errors import SandboxError

__all__ = ["Work", "close", "current"]

_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")


class _Process(Protocol):
    def terminate(self) -> None:
        """Without effect where it has ended."""


class _Closed(Protocol):
    def close(self) -> None:
        """Safe where the process behind it has been ended."""


class _Owner(_Closed, Protocol):
    @property
    def process(self) -> _Process:
        """What it is the other end of."""


_Made = TypeVar("_Made", bound=_Closed)
_Kept = TypeVar("_Kept", bound=_Owner)


class Work:
    """What one user of children has asked of other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._made: dict[Hashable, Future[Any]] = {}
        self.ended = False

    def submit(
        self,
        threads: ThreadPoolExecutor,
        function: Callable[_Args, _Answer],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> Future[_Answer]:
        """`function(*args, **kwargs)` in one of `threads`. Its children are this work's; killed
        ones raise SandboxError.
        """
        return threads.submit(lambda: self._run(function, *args, **kwargs))

    def once(
        self, threads: ThreadPoolExecutor, key: Hashable, make: Callable[[], _Kept]
    ) -> Future[_Kept]:
        """What `make` yields in one of `threads`, made once for all of this work, closed at its
        end.
        """
        with self._lock:
            if key not in self._made:
                self._made[key] = self.submit(threads, make)
            return self._made[key]

    def take(self, key: Hashable) -> Any | None:
        """What `once` made under that key, no longer this work's to end; None while it is being
        made, or where that failed.
        """
        with self._lock:
            future = self._made.get(key)
            if (
                self.ended
                or future is None
                or not future.done()
                or future.cancelled()
                or future.exception() is not None
            ):
                return None
            del self._made[key]
            made = future.result()
            self._processes = [
                process for process in self._processes if process is not made.process
            ]
            return made

    def started(self, process: _Process) -> None:
        """A child of this work runs; it is ended at once if the work is over."""
        with self._lock:
            self._processes.append(process)
            if self.ended:
                process.terminate()

    def end(self) -> None:
        """Kill what runs; what has not begun does not begin. Waits for nothing."""
        with self._lock:
            self.ended = True
            for process in self._processes:
                process.terminate()
            made = list(self._made.values())
        for future in made:
            future.add_done_callback(close)

    def _run(
        self, function: Callable[_Args, _Answer], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Answer:
        if self.ended:
            raise SandboxError("starting", "nobody waits for it any more")
        _HERE.work = self
        try:
            return function(*args, **kwargs)
        finally:
            _HERE.work = None


def close(future: Future[_Made]) -> None:
    """Close what a finished future holds, if it holds anything."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()


class _Here(threading.local):
    work: Work | None = None


_HERE = _Here()


def current() -> Work | None:
    """The work that this thread does; None in a thread that works for itself."""
    return _HERE.work
