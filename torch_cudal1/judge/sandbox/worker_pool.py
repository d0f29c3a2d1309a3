"""A pool of children for own code: a child is cleared and used again, since starting one takes
seconds, most of them for importing torch.

Inside `pool_scope()` a child that is still usable is kept for the next `acquire` of the same limits
and contract; foreign code always gets a process of its own. Outside `pool_scope()` each child is
new, and when the outermost scope ends, all children are closed.

`prestart` starts a child in another thread, for the next `acquire` or `spawn` of its kind. Inside
`pool_scope()` children are forked by a fork server. It outlives a scope that ended without an
exception by 20 s, for a caller that binds several modules or graphs one after the other.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import ParamSpec, TypeAlias, TypeVar

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import cancellable
from torch_cudal1.judge.sandbox.cancellable import TaskScope
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.sandbox.fork_server import ForkServer
from torch_cudal1.judge.sandbox.limits import Limits

__all__ = ["acquire", "expect", "pool_scope", "prestart", "run_in_background", "spawn"]

_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")
# GPU memory shared with each child, at least: inputs or results of one call.
_MIN_SHARED_BYTES = 256 << 20
# Nearly every request needs these modules.
_PRELOADED = ("torch._dynamo", "torch._inductor.compile_fx")
# After the last search.
_FORK_SERVER_LINGER_S = 20.0
_FORK_SERVER = "fork server"
_Kind: TypeAlias = tuple[Limits, Contract]


class _Pool(threading.local):
    """The pool of one thread. Threads share no child, which answers one request at a time."""

    def __init__(self) -> None:
        self.depth = 0
        self.idle: dict[_Kind, Child] = {}
        self.starting: dict[_Kind, list[Future[Child]]] = {}
        self.scope = TaskScope()


_POOL = _Pool()


class _IdleForkServers:
    """Fork servers that no search uses, each closed after 20 s. Shared by all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fork_servers: dict[bool, tuple[ForkServer, threading.Timer]] = {}

    def put(self, visible_gpu: bool, fork_server: ForkServer) -> None:
        """Keep `fork_server`; the earlier one for the same `visible_gpu` is closed."""
        timer = threading.Timer(_FORK_SERVER_LINGER_S, self._expire, (fork_server,))
        # The interpreter would wait for the timer at exit.
        timer.daemon = True
        with self._lock:
            before = self._fork_servers.get(visible_gpu)
            self._fork_servers[visible_gpu] = (fork_server, timer)
            timer.start()
        if before is not None:
            before[1].cancel()
            before[0].close()

    def take(self, visible_gpu: bool) -> ForkServer | None:
        """A current fork server, which the caller now owns; None if there is none."""
        with self._lock:
            fork_server, timer = self._fork_servers.pop(visible_gpu, (None, None))
        if fork_server is None or timer is None:
            return None
        timer.cancel()
        # The user may have changed the environment since it started.
        if fork_server.is_current():
            return fork_server
        fork_server.close()
        return None

    def close_all(self) -> None:
        """Close all of them, at exit."""
        for visible_gpu in (True, False):
            with self._lock:
                fork_server, timer = self._fork_servers.pop(visible_gpu, (None, None))
            if fork_server is not None and timer is not None:
                timer.cancel()
                fork_server.close()

    def forget(self) -> None:
        """Drop them without closing them, in a fork of this process: the parent owns them."""
        self.__init__()  # type: ignore[misc]

    def _expire(self, fork_server: ForkServer) -> None:
        with self._lock:
            expired = [
                visible_gpu
                for visible_gpu, (server, _) in self._fork_servers.items()
                if server is fork_server
            ]
            for visible_gpu in expired:
                del self._fork_servers[visible_gpu]
        # A search may have taken it since the timer fired; it is in use then.
        if expired:
            fork_server.close()


_IDLE_FORK_SERVERS = _IdleForkServers()
atexit.register(_IDLE_FORK_SERVERS.close_all)
os.register_at_fork(after_in_child=_IDLE_FORK_SERVERS.forget)


@contextmanager
def pool_scope() -> Iterator[None]:
    """Keep children for the body, in this thread. Scopes may be nested: the outermost closes the
    children and cancels background tasks.
    """
    _POOL.depth += 1
    try:
        yield
        # Only after a body without an exception: an interrupted search ends everything.
        if _POOL.depth == 1:
            for visible_gpu in (True, False):
                fork_server = _POOL.scope.release((_FORK_SERVER, visible_gpu))
                if fork_server is not None:
                    _IDLE_FORK_SERVERS.put(visible_gpu, fork_server)
    finally:
        _POOL.depth -= 1
        if not _POOL.depth:
            while _POOL.idle:
                _POOL.idle.popitem()[1].close()
            _POOL.scope.cancel()
            _POOL.scope = TaskScope()
            for futures in _POOL.starting.values():
                for future in futures:
                    # A start may still be under way, and waiting for it would delay an interrupt.
                    future.add_done_callback(cancellable.close_result)
            _POOL.starting.clear()


def prestart(limits: Limits, contract: Contract, shared_bytes: int = 0) -> None:
    """Start a child with these limits and contract in the background, unless a started one is still
    unused. Does nothing outside `pool_scope()`, which closes it.

    `shared_bytes`: GPU memory to share with it, enough for the tensors of one call; larger messages
    go through files.
    """
    if _POOL.depth and limits.trust == "own" and not _POOL.starting.get((limits, contract)):
        starting = _POOL.scope.submit(
            _get_starter_thread(limits.gpu),
            _start_child,
            limits,
            contract,
            shared_bytes,
            _find_fork_server(limits),
        )
        _POOL.starting.setdefault((limits, contract), []).append(starting)


def expect(limits: Limits) -> None:
    """Start the fork server for children with these limits ahead of the first of them."""
    _find_fork_server(limits)


def run_in_background(
    threads: ThreadPoolExecutor,
    function: Callable[_Args, _Answer],
    *args: _Args.args,
    **kwargs: _Args.kwargs,
) -> Future[_Answer]:
    """Run `function(*args, **kwargs)` in one of `threads`; its children are killed when
    `pool_scope()` ends here.
    """
    return _POOL.scope.submit(threads, function, *args, **kwargs)


@contextmanager
def spawn(limits: Limits, contract: Contract) -> Iterator[Child]:
    """A new child, closed after the body; one from `prestart` if there is one."""
    with _take_prestarted((limits, contract)) or _start_child(
        limits, contract, fork_server=_find_fork_server(limits)
    ) as child:
        yield child


@contextmanager
def acquire(limits: Limits, contract: Contract) -> Iterator[Child]:
    """A cleared child for own code, from the pool if it has one. Raises SandboxError.

    An exception in the body closes the child; so does setting its `usable` to False.
    """
    if limits.trust != "own":
        raise ValueError("the pool is for our own code; foreign code gets a process of its own")
    kind = (limits, contract)
    child = (
        _clear(_POOL.idle.pop(kind, None))
        or _take_prestarted(kind)
        or _start_child(limits, contract, fork_server=_find_fork_server(limits))
    )
    try:
        yield child
    except BaseException:
        # Machine code may have gone wrong in it, and what else it overwrote is unknown.
        child.close()
        raise
    if _POOL.depth and child.usable and kind not in _POOL.idle:
        _POOL.idle[kind] = child
    else:
        child.close()


def _start_child(
    limits: Limits,
    contract: Contract,
    shared_bytes: int = 0,
    fork_server: Future[ForkServer] | None = None,
) -> Child:
    """A new child, forked where that works. A child for foreign code shares no GPU memory."""
    shared_bytes = max(shared_bytes, _MIN_SHARED_BYTES) if limits.trust == "own" else 0
    if fork_server is not None:
        try:
            return Child(
                limits, contract, shared_bytes=shared_bytes, fork_server=fork_server.result()
            )
        except SandboxError as error:
            scope = cancellable.current_scope()
            # The cancelled scope killed the fork server. The search wants no other child.
            if scope is not None and scope.cancelled:
                raise
            telemetry.record("judge", "nursery", "none", reason=error.found)
    return Child(limits, contract, shared_bytes=shared_bytes)


def _find_fork_server(limits: Limits) -> Future[ForkServer] | None:
    """The fork server for children with these limits, started at the first call; None outside
    `pool_scope()` and for foreign code.
    """
    scope = cancellable.current_scope() or (_POOL.scope if _POOL.depth else None)
    if scope is None or limits.trust != "own":
        return None
    return scope.submit_once(
        _get_starter_thread(limits.gpu),
        (_FORK_SERVER, limits.visible_gpu),
        partial(_open_fork_server, limits.visible_gpu),
    )


def _open_fork_server(visible_gpu: bool) -> ForkServer:
    """The fork server that the last search left, else a new one. Raises SandboxError."""
    idle = _IDLE_FORK_SERVERS.take(visible_gpu)
    if idle is None:
        return ForkServer(_PRELOADED, own=True, visible_gpu=visible_gpu)
    if (scope := cancellable.current_scope()) is not None:
        scope.add_process(idle.process)
    return idle


def _clear(child: Child | None) -> Child | None:
    """The child, cleared of its last user; None if it cannot be cleared."""
    if child is None:
        return None
    try:
        child.call("clear")
    except CandidateFailure:
        child.close()
        return None
    telemetry.count("children_reused")
    return child


def _take_prestarted(kind: _Kind) -> Child | None:
    """A child from `prestart`, once it has started; None if there is none, or its start failed."""
    futures = _POOL.starting.get(kind)
    if not futures:
        return None
    try:
        return futures.pop(0).result()
    except SandboxError:
        # The caller starts another child, and gets the reason if that fails too.
        return None


@cache
def _get_starter_thread(gpu: bool) -> ThreadPoolExecutor:
    """The thread that starts children with a GPU, or the one for children without.

    One thread each: the first start probes the sandbox, and the next ones use the result.
    """
    # Kept for the life of the process: Linux kills a child when the thread that started it ends.
    return ThreadPoolExecutor(1, f"cudal1-children-{'gpu' if gpu else 'cpu'}")
