"""Notes which forms of calls production makes, and how often, for a later warm-up:
`cudal1.record(path)`, or the setting `record`.

Counted are the calls of accelerated modules and of graphs that the backend compiled while a
recording ran, by form: dtypes, shapes, strides, devices, grad mode, train or eval, autocast, and
flags and numbers among the arguments. Never written: values of tensors, weights, texts. Not
counted: calls inside `disabled()`, under a tracer, and those that no kernel could serve by their
kind.

A call of a known form costs one addition, in the dispatch table one in C++ that is made anyway; the
first of a form is described, which takes tens of microseconds. A thread writes every few seconds:
each new form, and counts whenever they have doubled, so that a file grows with the forms and hardly
with the calls; a process that is killed loses at the most the younger half of its counts. At most
4,096 forms a process are kept; what comes beyond them is not recorded, and the report says so.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import fx, nn

from torch_cudal1.core import telemetry
from torch_cudal1.core.call_signature import FormError, describe
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.capture import find_lifted_parameters, is_dynamic
from torch_cudal1.graph.graph_digest import compute_graph_outline
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.recording_file import LINE_LIMIT_BYTES, CallRecord, Mode, append_calls

__all__ = [
    "Counter",
    "Tally",
    "compute_module_identity",
    "count_graph",
    "is_on",
    "keep_recording",
    "note_call",
    "record",
    "watch_counts",
]

# Bounds the memory and the file of a process whose shapes never repeat.
MAX_FORMS = 4096
# A killed process loses what it counted in this time, and the younger half of older counts.
WRITE_INTERVAL_S = 5.0

# Reentrant: `keep_recording` starts a recording, and writing asks dispatchers for counts, under it.
_lock = threading.RLock()
_counters: dict[CallRecord, Counter] = {}
_active: list[record] = []
_kept_recordings: dict[Path, record] = {}
# Weak: a recording must not keep modules alive.
_counting_dispatchers: weakref.WeakSet[CallCounting] = weakref.WeakSet()


class CallCounting(Protocol):
    """Counts calls by itself, such as the dispatcher of a module."""

    def begin_counting(self) -> None:
        """Let every form pass where it can be noted once."""

    def bring_counts(self) -> None:
        """Add what was counted since the last time to the counters."""


@dataclass
class Counter:
    """How often a form came; the count only grows."""

    calls: int = 0


# Lower case, because users read it as a verb: `with cudal1.record(path):`.
@dataclass(eq=False)
class record:
    """Append to `path` what the process calls, from `start()` to `stop()`, or inside a `with`
    block.

    The file is made if it is not there; any number of processes may write to one. What the file
    system refuses, and a file that has reached its limit of 16 MiB, cost the record and nothing
    else: `report()` says so.
    """

    path: Path
    _written: dict[CallRecord, int] = field(default_factory=dict, repr=False)
    _before: dict[CallRecord, int] = field(default_factory=dict, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        # Absolute now: the process may change its folder before the thread writes.
        self.path = Path(self.path).expanduser().absolute()

    def start(self) -> record:
        """Begin; without effect while it runs."""
        with _lock:
            if self in _active:
                return self
            _prepare_for_forks()
            for watched in list(_counting_dispatchers):
                watched.bring_counts()
                # Every form must pass through Python once to be described; forms that the dispatch
                # table serves would not.
                watched.begin_counting()
            # Counters are shared by all recordings, so each one subtracts what came before it.
            self._before = {form: counter.calls for form, counter in _counters.items()}
            self._written, self._ended = {}, threading.Event()
            _active.append(self)
            self._start_thread()
        return self

    def stop(self) -> None:
        """Write what is not yet written, and end; without effect when it does not run."""
        with _lock:
            if self not in _active:
                return
            self._ended.set()
            self._write(final=True)
            _active.remove(self)
        # Outside of the lock, which the thread takes to write: joined under it, both would wait for
        # ever.
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> record:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_thread(self) -> None:
        # A daemon: a recording that was never stopped must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(self._ended,), name="cudal1-record", daemon=True
        )
        self._thread.start()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(WRITE_INTERVAL_S):
            with _lock:
                # `stop` may have written the last lines while this thread waited for the lock.
                if not ended.is_set():
                    self._write(final=False)

    def _write(self, *, final: bool) -> None:
        """Append what is new: whole at the end, before that only forms whose count has doubled
        since it was written.
        """
        for watched in list(_counting_dispatchers):
            watched.bring_counts()
        lines = []
        for form, counter in _counters.items():
            written = self._written.get(form, 0)
            unwritten = counter.calls - self._before.get(form, 0) - written
            # Doubling bounds the lines of a form by the logarithm of its calls.
            if unwritten > 0 and (final or unwritten >= written):
                lines.append(replace(form, calls=unwritten))
        if not lines:
            return
        stored = append_calls(self.path, lines)
        # Lines that were lost are not tried again: a full disk would be asked for ever.
        for line in lines:
            form = replace(line, calls=0)
            self._written[form] = self._written.get(form, 0) + line.calls
        if isinstance(stored, Refusal):
            telemetry.record("record", "not_stored", reason=stored.reason, lines=len(lines))

    def _restart_after_fork(self) -> None:
        """In a forked child: count from here, and start a thread of its own."""
        # The parent writes what was counted before the fork. Written by the child too, it would
        # count twice.
        self._before, self._written = (
            {form: counter.calls for form, counter in _counters.items()},
            {},
        )
        self._ended = threading.Event()
        self._start_thread()


def is_on() -> bool:
    """Whether any recording runs."""
    return bool(_active)


def keep_recording(path: Path | None) -> None:
    """Record into `path` until the process ends; None asks for nothing. What the setting `record`
    does.
    """
    if path is None:
        return
    with _lock:
        if path not in _kept_recordings:
            # A recording of the setting has no `with` block that would write the last lines.
            if not _kept_recordings:
                atexit.register(_stop_all_recordings)
            _kept_recordings[path] = record(path).start()


def watch_counts(watched: CallCounting) -> None:
    """Ask `watched` for its counts from now on, for as long as it lives."""
    with _lock:
        _counting_dispatchers.add(watched)


def note_call(
    module: nn.Module, identity: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Counter | None:
    """The counter of calls of this form, in the present modes; None where there is no form, or no
    room for one more.
    """
    mode = Mode(torch.is_grad_enabled(), module.training, _read_autocast_modes())
    try:
        # Shapes, dtypes, flags and numbers only: values of tensors and texts are never described.
        form = describe((args, kwargs))
    except FormError:
        return None
    return _find_or_add_counter(
        CallRecord("module", type(module).__qualname__, identity, canonical_json(form), mode)
    )


def count_graph(
    call: Callable[..., Any], graph: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """`call`, compiled from `graph` of the backend, counted. Whether a module is in train or eval
    mode is not seen here.

    Named are the tensors among the arguments of the user's function, by Dynamo's name for them;
    weights are left out. A graph with dynamic shapes is counted by the shapes that come, at a few
    microseconds a call.
    """
    weights, outline = find_lifted_parameters(graph), compute_graph_outline(graph)
    names = [
        _strip_dynamo_prefix(node.name) for node in graph.graph.nodes if node.op == "placeholder"
    ]
    tensor_names = {
        i: name
        for i, name in enumerate(names)
        if i not in weights and isinstance(inputs[i], torch.Tensor)
    }
    # Dynamo makes an input of a number that the module holds, which is no argument of the call.
    tensor_names = {i: name for i, name in tensor_names.items() if not name.startswith("self_")}
    # A graph does not know whether its module is in train or eval mode.
    mode = Mode(torch.is_grad_enabled(), False, _read_autocast_modes())

    def find_counter(items: Sequence[Any]) -> Counter | None:
        form = describe({name: items[i] for i, name in tensor_names.items()})
        return _find_or_add_counter(
            CallRecord("graph", "graph", outline, canonical_json(form), mode)
        )

    # A dynamic graph serves many shapes, so its form is not known until it is called.
    if is_dynamic(inputs):
        return _count_by_shape(call, tuple(tensor_names), find_counter)
    counter = find_counter(inputs)
    if counter is None:
        return call

    def count_call(*args: Any) -> Any:
        counter.calls += 1
        return call(*args)

    return count_call


def _count_by_shape(
    call: Callable[..., Any],
    tensors: tuple[int, ...],
    counter_of: Callable[[Sequence[Any]], Counter | None],
) -> Callable[..., Any]:
    counters: dict[Any, Counter | None] = {}

    def count_call(*args: Any) -> Any:
        shapes = tuple((args[i].shape, args[i].stride()) for i in tensors)
        # The table is bounded too: without that it would grow with every new shape.
        if shapes not in counters and len(counters) < MAX_FORMS:
            counters[shapes] = counter_of(args)
        if (counter := counters.get(shapes)) is not None:
            counter.calls += 1
        return call(*args)

    return count_call


def compute_module_identity(module: nn.Module) -> str:
    """What makes two modules the same for a recording: class, and names, shapes and types of
    weights; no values.
    """
    weights = [
        [name, str(t.dtype), list(t.shape)]
        for name, t in (*module.named_parameters(), *module.named_buffers())
    ]
    return hashlib.sha256(
        canonical_json([type(module).__qualname__, weights]).encode()
    ).hexdigest()[:16]


class Tally:
    """The counters of one module's calls. It counts calls through the dispatcher itself, and gets
    the counts of the dispatch table.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._identity = weakref.ref(module), ""
        self._counters: dict[Any, Counter | None] = {}
        # Keyed by identity; the binding is kept alive here, so that its id is not given to another.
        self._quick: dict[int, tuple[Any, Counter | None]] = {}
        self._brought: dict[int, int] = {}
        # A recording's thread asks for counts while calls may clear the table.
        self.lock = threading.RLock()

    def note(self, key: Any, bound: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call that came through Python; the table may serve the next ones with `bound`."""
        module = self._module()
        if module is None:
            return
        # Train or eval mode is compared by the guard, so it is not part of the signature.
        key = (key, module.training)
        if key not in self._counters:
            if len(self._counters) >= MAX_FORMS:
                telemetry.count("forms_not_recorded")
                return
            self._identity = self._identity or compute_module_identity(module)
            self._counters[key] = note_call(module, self._identity, args, kwargs)
        counter = self._counters[key]
        if counter is not None:
            counter.calls += 1
        self._quick[id(bound)] = bound, counter

    def bring(self, served: Sequence[tuple[object, int]]) -> None:
        """Add a table's counts, totals since it was cleared: only what is new in them."""
        for owner, calls in served:
            _, counter = self._quick.get(id(owner), (None, None))
            if counter is not None:
                # The table reports totals since it was cleared.
                counter.calls += calls - self._brought.get(id(owner), 0)
            self._brought[id(owner)] = calls

    def begin(self) -> None:
        """Forget the bindings of a table that was cleared: it counts from zero."""
        self._quick, self._brought = {}, {}


def _find_or_add_counter(form: CallRecord) -> Counter | None:
    with _lock:
        counter = _counters.get(form)
        if counter is None:
            # A longer line than a reader accepts would be written and never read.
            if len(_counters) >= MAX_FORMS or len(form.form) > LINE_LIMIT_BYTES:
                telemetry.count("forms_not_recorded")
                return None
            counter = _counters[form] = Counter()
        return counter


def _strip_dynamo_prefix(name: str) -> str:
    """Dynamo calls what stands for the local variable x "L_x_"."""
    inner = name.removeprefix("L_").removeprefix("l_")
    return inner.removesuffix("_") if inner != name else name


def _read_autocast_modes() -> tuple[tuple[str, str], ...]:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple(
        (kind, str(torch.get_autocast_dtype(kind)).removeprefix("torch.")) for kind in kinds
    )


def _stop_all_recordings() -> None:
    for recording in list(_active):
        recording.stop()


def _prepare_fork() -> None:
    """Take the lock and collect all counts, so that the parent writes what was counted so far.

    A lock that another thread holds at the fork would stay locked in the child for ever.
    """
    _lock.acquire()
    for watched in list(_counting_dispatchers):
        watched.bring_counts()


def _restart_in_child() -> None:
    # The parent's lock is held in the child by a thread that does not exist there.
    global _lock
    _lock = threading.RLock()
    for recording in _active:
        recording._restart_after_fork()


@cache
def _prepare_for_forks() -> None:
    """Once, when the first recording starts: importing this does nothing."""
    os.register_at_fork(
        before=_prepare_fork,
        after_in_parent=lambda: _lock.release(),
        after_in_child=_restart_in_child,
    )
