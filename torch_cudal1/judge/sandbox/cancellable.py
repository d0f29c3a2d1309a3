"""Cancellable tasks in other threads: cancelling a scope kills the child processes of its tasks.

Without that, an interrupted search would not end before its last child has imported torch: the
interpreter joins its threads at exit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, Protocol, TypeVar

from torch_cudal1.core.errors import SandboxError

__all__ = ["TaskScope", "close_result", "current_scope"]

_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")


class _Process(Protocol):
    def terminate(self) -> None:
        """Send SIGTERM; without effect on a process that has ended."""


class _Closed(Protocol):
    def close(self) -> None:
        """Release it; safe where the process behind it has ended."""


class _Owner(_Closed, Protocol):
    @property
    def process(self) -> _Process:
        """The process that this object controls."""


_Resource = TypeVar("_Resource", bound=_Closed)
_Shared = TypeVar("_Shared", bound=_Owner)


class TaskScope:
    """Tasks that one thread has submitted to others, and the processes that these started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[_Process] = []
        self._shared: dict[Hashable, Future[Any]] = {}
        self.cancelled = False

    def submit(
        self,
        threads: ThreadPoolExecutor,
        function: Callable[_Args, _Answer],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> Future[_Answer]:
        """Run `function(*args, **kwargs)` in one of `threads`. Its children belong to this scope;
        killed ones raise SandboxError.
        """
        return threads.submit(lambda: self._run(function, *args, **kwargs))

    def submit_once(
        self, threads: ThreadPoolExecutor, key: Hashable, make: Callable[[], _Shared]
    ) -> Future[_Shared]:
        """The result of `make`, run once per scope and key in one of `threads`; closed with the
        scope.
        """
        with self._lock:
            # The lock covers the test and the submission: two threads must not run `make` twice.
            if key not in self._shared:
                self._shared[key] = self.submit(threads, make)
            return self._shared[key]

    def release(self, key: Hashable) -> Any | None:
        """Take the result of `submit_once` under that key out of this scope; None while it is being
        made, or where that failed.
        """
        with self._lock:
            future = self._shared.get(key)
            if (
                self.cancelled
                or future is None
                or not future.done()
                or future.cancelled()
                or future.exception() is not None
            ):
                return None
            del self._shared[key]
            resource = future.result()
            # The caller owns the process now, so `cancel` must no longer kill it.
            self._processes = [
                process for process in self._processes if process is not resource.process
            ]
            return resource

    def add_process(self, process: _Process) -> None:
        """Kill this process with the scope; at once if the scope is cancelled already."""
        with self._lock:
            self._processes.append(process)
            # A thread may start a process while another cancels the scope.
            if self.cancelled:
                process.terminate()

    def cancel(self) -> None:
        """Kill the processes; tasks that have not begun do not begin. Waits for nothing."""
        with self._lock:
            self.cancelled = True
            for process in self._processes:
                process.terminate()
            futures = list(self._shared.values())
        for future in futures:
            # Not future.result(): that would wait for a start that is still under way.
            future.add_done_callback(close_result)

    def _run(
        self, function: Callable[_Args, _Answer], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Answer:
        if self.cancelled:
            raise SandboxError("starting", "the task was cancelled")
        _THREAD.scope = self
        try:
            return function(*args, **kwargs)
        finally:
            # The thread runs tasks of other scopes later.
            _THREAD.scope = None


def close_result(future: Future[_Resource]) -> None:
    """Close the result of a finished future, if it has one."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()


class _Thread(threading.local):
    scope: TaskScope | None = None


_THREAD = _Thread()


def current_scope() -> TaskScope | None:
    """The scope whose task this thread runs; None in a thread that runs none."""
    return _THREAD.scope
