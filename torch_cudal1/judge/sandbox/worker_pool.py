"""Children kept warm between questions about code of our own: starting one takes seconds, most of
them for importing torch.

Inside `kept_warm()` a child that answered well is cleared and lent again, to own code under the
same limits and contract only; what strangers wrote always gets a process of its own. A child in
which machine code went wrong is not kept: what else it wrote to is unknown. Outside `kept_warm()`
every loan is a fresh child, and when the outermost one ends no child is left.

`begin` starts a child in the background, for the next loan, or the next `fresh` child, that asks
for one of its kind. Inside `kept_warm()` children are forked from a process that has imported what
they need (`nursery`): each after the first is there soon. That process stays for a while when the
body has ended well, for who binds one module, or one graph, after the other.
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
from torch_cudal1.judge.sandbox.cancellable import Work
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.sandbox.fork_server import Nursery
from torch_cudal1.judge.sandbox.limits import Limits

__all__ = ["begin", "expect", "fresh", "in_background", "kept_warm", "lent"]

_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")
_SHARED_BYTES = 256 << 20  # of the GPU with each child, at least: inputs or results of one call
_IMPORTS = ("torch._dynamo", "torch._inductor.compile_fx")  # what nearly every question needs
_STAYS_S = 20.0  # what forks children, after the last search
_Kind: TypeAlias = tuple[Limits, Contract]


class _Store(threading.local):
    """Of one thread: a child answers one question at a time."""

    def __init__(self) -> None:
        self.depth = 0
        self.idle: dict[_Kind, Child] = {}
        self.coming: dict[_Kind, list[Future[Child]]] = {}
        self.work = Work()


_STORE = _Store()


class _Staying:
    """Nurseries that no search uses, each until its time is up. For all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nurseries: dict[bool, tuple[Nursery, threading.Timer]] = {}

    def put(self, visible_gpu: bool, nursery: Nursery) -> None:
        """Keep it; one that stays already is ended."""
        timer = threading.Timer(_STAYS_S, self._end, (nursery,))
        timer.daemon = True
        with self._lock:
            before, self._nurseries[visible_gpu] = (
                self._nurseries.get(visible_gpu),
                (nursery, timer),
            )
            timer.start()
        if before is not None:
            before[1].cancel()
            before[0].close()

    def take(self, visible_gpu: bool) -> Nursery | None:
        """The one that stays, no longer to be ended here; None if there is none that a search could
        use now.
        """
        with self._lock:
            nursery, timer = self._nurseries.pop(visible_gpu, (None, None))
        if nursery is None or timer is None:
            return None
        timer.cancel()
        if nursery.is_current():
            return nursery
        nursery.close()
        return None

    def end(self) -> None:
        """End all."""
        for visible_gpu in (True, False):
            with self._lock:
                nursery, timer = self._nurseries.pop(visible_gpu, (None, None))
            if nursery is not None and timer is not None:
                timer.cancel()
                nursery.close()

    def forget(self) -> None:
        """For a fork of this process, whose parent's they are."""
        self.__init__()  # type: ignore[misc]

    def _end(self, nursery: Nursery) -> None:
        with self._lock:
            mine = [
                visible_gpu for visible_gpu, (kept, _) in self._nurseries.items() if kept is nursery
            ]
            for visible_gpu in mine:
                del self._nurseries[visible_gpu]
        if mine:
            nursery.close()


_STAYING = _Staying()
atexit.register(_STAYING.end)
os.register_at_fork(after_in_child=_STAYING.forget)


@contextmanager
def kept_warm() -> Iterator[None]:
    """Keep children for the body, in this thread. May be nested: the outermost ends them, and what
    is done in the background.
    """
    _STORE.depth += 1
    try:
        yield
        if _STORE.depth == 1:
            for visible_gpu in (True, False):
                if (nursery := _STORE.work.take(("nursery", visible_gpu))) is not None:
                    _STAYING.put(visible_gpu, nursery)
    finally:
        _STORE.depth -= 1
        if not _STORE.depth:
            while _STORE.idle:
                _STORE.idle.popitem()[1].close()
            _STORE.work.end()
            _STORE.work = Work()
            for futures in _STORE.coming.values():
                for future in futures:
                    future.add_done_callback(cancellable.close)
            _STORE.coming.clear()


def begin(limits: Limits, contract: Contract, shared_bytes: int = 0) -> None:
    """Start a child of that kind in the background, unless one is coming that nobody has taken yet.

    Does nothing outside `kept_warm()`, where nobody would end it.

    `shared_bytes` of its GPU are shared with it: as much as the tensors of one call, which
    otherwise go through files.
    """
    if _STORE.depth and limits.trust == "own" and not _STORE.coming.get((limits, contract)):
        starting = _STORE.work.submit(
            _threads(limits.gpu), _started, limits, contract, shared_bytes, _nursery(limits)
        )
        _STORE.coming.setdefault((limits, contract), []).append(starting)


def expect(limits: Limits) -> None:
    """Start importing what children of these limits will need, where children will probably be
    asked for later in the body.
    """
    _nursery(limits)


def in_background(
    threads: ThreadPoolExecutor,
    function: Callable[_Args, _Answer],
    *args: _Args.args,
    **kwargs: _Args.kwargs,
) -> Future[_Answer]:
    """`function(*args, **kwargs)` in one of `threads`, as long as `kept_warm()` lasts here: then
    its children are killed.
    """
    return _STORE.work.submit(threads, function, *args, **kwargs)


@contextmanager
def fresh(limits: Limits, contract: Contract) -> Iterator[Child]:
    """A child that has run nothing, and runs nothing after the body; one that `begin` has started
    if there is one.
    """
    with _begun((limits, contract)) or _started(
        limits, contract, nursery=_nursery(limits)
    ) as child:
        yield child


@contextmanager
def lent(limits: Limits, contract: Contract) -> Iterator[Child]:
    """A cleared child for code of our own, warm if there is one. Raises SandboxError.

    An exception in the body ends the child; so does setting its `usable` to False.
    """
    if limits.trust != "own":
        raise ValueError(
            "a child is lent to code of our own; what strangers wrote gets a process of its own"
        )
    kind = (limits, contract)
    child = (
        _cleared(_STORE.idle.pop(kind, None))
        or _begun(kind)
        or _started(limits, contract, nursery=_nursery(limits))
    )
    try:
        yield child
    except BaseException:
        child.close()
        raise
    if _STORE.depth and child.usable and kind not in _STORE.idle:
        _STORE.idle[kind] = child
    else:
        child.close()


def _started(
    limits: Limits,
    contract: Contract,
    shared_bytes: int = 0,
    nursery: Future[Nursery] | None = None,
) -> Child:
    """A new child, forked if that can be; a stranger's shares no memory."""
    shared_bytes = max(shared_bytes, _SHARED_BYTES) if limits.trust == "own" else 0
    if nursery is not None:
        try:
            return Child(limits, contract, shared_bytes=shared_bytes, nursery=nursery.result())
        except SandboxError as error:
            work = cancellable.current()
            if work is not None and work.ended:
                raise
            telemetry.record("judge", "nursery", "none", reason=error.found)
    return Child(limits, contract, shared_bytes=shared_bytes)


def _nursery(limits: Limits) -> Future[Nursery] | None:
    """What forks children of these limits, started when it is first asked for; None outside
    `kept_warm()` and for strangers.
    """
    work = cancellable.current() or (_STORE.work if _STORE.depth else None)
    if work is None or limits.trust != "own":
        return None
    return work.once(
        _threads(limits.gpu), ("nursery", limits.visible_gpu), partial(_opened, limits.visible_gpu)
    )


def _opened(visible_gpu: bool) -> Nursery:
    """The nursery that the last search has left, else a new one. Raises SandboxError."""
    staying = _STAYING.take(visible_gpu)
    if staying is None:
        return Nursery(_IMPORTS, own=True, visible_gpu=visible_gpu)
    if (work := cancellable.current()) is not None:
        work.started(staying.process)
    return staying


def _cleared(child: Child | None) -> Child | None:
    """The child with nothing of the last question in it; None if it cannot be cleared."""
    if child is None:
        return None
    try:
        child.call("clear")
    except CandidateFailure:
        child.close()
        return None
    telemetry.count("children_reused")
    return child


def _begun(kind: _Kind) -> Child | None:
    """A child that was started in the background, once it is there; None if none was, or none could
    be.
    """
    futures = _STORE.coming.get(kind)
    if not futures:
        return None
    try:
        return futures.pop(0).result()
    except SandboxError:
        return None  # who asks starts one, and is told the reason where that fails too


@cache
def _threads(gpu: bool) -> ThreadPoolExecutor:
    """One thread starts children with a GPU, one those without: what the first finds out about the
    machine serves the next.

    They live as long as the process: the kernel ends a child with the thread that started it.
    """
    return ThreadPoolExecutor(1, f"cudal1-children-{'gpu' if gpu else 'cpu'}")
