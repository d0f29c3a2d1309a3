"""Replaces a graph's callable by the chosen candidate, with the reference as its fallback.

A replacement takes inputs and returns outputs in the graph's order. A failing candidate must not
fail the call: `Swapped` checks the kill switch at every call, and runs the reference when the
candidate raises.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.graph.addresses import find_address_span, lie_at
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.records import Candidate, Region
from torch_cudal1.runtime.cuda_graph import GraphedRunner
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.runtime.kill_switch import is_disabled
from torch_cudal1.runtime.runner import build_runner

__all__ = [
    "FAILURES",
    "Around",
    "GraphedLater",
    "Positional",
    "Swapped",
    "on_withdrawal",
    "reorder_inputs",
    "swap",
    "withdraw",
]

# No BaseException: an interrupt of the user's is no failure of a candidate.
FAILURES = (
    Cudal1Error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# Takes a graph's inputs in one sequence.
Positional: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
# Wraps the built callable, for instance in a check.
Around: TypeAlias = "Callable[[Swapped, Runner], Runner]"

_lock = threading.Lock()
# Weak: a model that the user drops must not live on because a kernel of it could be withdrawn.
_in_use: weakref.WeakSet[Swapped] = weakref.WeakSet()
# WeakMethod: a plain weak reference to a bound method dies at once.
_listeners: list[weakref.WeakMethod[Callable[[str, str], None]]] = []


class _OursFirst:
    """Runs a candidate, or its fallback while the kill switch is on. After a failure of the
    candidate the fallback runs for the rest of the process.
    """

    def __init__(self, strictness: str, region: str = "") -> None:
        self._strictness, self._key = strictness, region
        self.quarantined = ""  # the reason, once the candidate has failed

    def _call_candidate_first(
        self, candidate_call: Positional, compiled_call: Positional, inputs: Sequence[Any]
    ) -> Any:
        # Read at every call, so that the kill switch works on a process that runs already.
        if self.quarantined or is_disabled():
            return compiled_call(inputs)
        try:
            return candidate_call(inputs)
        except FAILURES as error:
            if is_sticky(error):
                # the CUDA context may be corrupt: nothing that runs after this can be trusted
                raise
            failure = error
        # If this fails too, the inputs are at fault: the user gets PyTorch's own exception, and the
        # candidate is not quarantined.
        results = compiled_call(inputs)
        self.quarantined = f"{type(failure).__name__}: {failure}"
        # Only after the reference succeeded on the same inputs: now the candidate is at fault.
        telemetry.fallback("run", failure, strictness=self._strictness, region=self._key)
        return results


class Swapped(_OursFirst):
    """A region's candidate as a callable: takes the inputs in canonical order, and falls back to
    the reference.
    """

    candidate = ""  # the digest of what runs

    def __init__(
        self, region: Region, runner: Runner, device: torch.device, strictness: str
    ) -> None:
        super().__init__(strictness, region.key)
        self._region, self._runner, self._device = region, runner, device
        self._reference: Runner | None = None

    @property
    def runner(self) -> Runner:
        """What runs the candidate."""
        return self._runner

    def put_in_front(self, around: Around) -> None:
        """Replace the callable by `around(self, callable)`."""
        self._runner = around(self, self._runner)

    @property
    def direct(self) -> Runner | None:
        """The callable itself, for a caller that checks the kill switch and comes here when it
        fails; None once it has failed.
        """
        return None if self.quarantined else getattr(self._runner, "direct", self._runner)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The region's outputs."""
        results: list[torch.Tensor | None] = self._call_candidate_first(
            self._runner, self.reference, inputs
        )
        return results

    def reference(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The user's own operators, one after the other."""
        # Built at the first need: it takes time, and most processes never need it.
        if self._reference is None:
            self._reference = prepare(self._region.program, self._device)
        return self._reference(inputs)


class GraphedLater(_OursFirst):
    """Inductor's callable for an inference graph. The first call runs it directly, later calls run it
    as a CUDA graph.

    Takes the graph's inputs as separate arguments, as Dynamo passes them; falls back to `compiled`.
    `written`: the inputs that it writes to. They are replayed where they lie, from the second call
    on in which they lie there; a caller that passes others at each call gets `compiled`.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        static: frozenset[int],
        device: torch.device,
        strictness: str,
        written: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(strictness)
        self._compiled: Positional = lambda inputs: list(compiled(*inputs))
        self._static, self._written = static | written, sorted(written)
        self._graphed = GraphedRunner(self._compiled, self._static, device, written=written)
        # Where the inputs lay in the call before; None before the first.
        self._addresses: list[int] | None = None
        # First and last address of each written input there, and the sizes of the copied ones.
        self._written_spans: list[tuple[int, int]] = []
        self._copied_sizes: list[tuple[int, int]] = []

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """The graph's outputs, none of which shares memory with another call's."""
        # A capture takes time, and the first answer does not wait for it.
        may_replay = self._lie_where_they_lay(inputs) and not self._has_overlap(inputs)
        candidate_call = self._graphed if may_replay else self._compiled
        results: Sequence[Any] = self._call_candidate_first(candidate_call, self._compiled, inputs)
        return results

    def _lie_where_they_lay(self, inputs: Sequence[Any]) -> bool:
        """Whether the written inputs lie where they lay in the call before. Notes where they lie."""
        # Most graphs write to nothing, and this is on the way of every call.
        if self._addresses is not None and (
            not self._written or lie_at(inputs, self._addresses, self._written)
        ):
            return True
        self._addresses = [tensor.data_ptr() for tensor in inputs]
        spans = [find_address_span(tensor) for tensor in inputs]
        self._written_spans = [spans[position] for position in self._written]
        # Shapes and strides are the same in every call: the graph was compiled for them.
        self._copied_sizes = [
            (position, end - begin)
            for position, (begin, end) in enumerate(spans)
            if self._written and position not in self._static
        ]
        return False

    def _has_overlap(self, inputs: Sequence[Any]) -> bool:
        """Whether an input that the graph reads from a copy lies in memory that it writes to."""
        for position, size in self._copied_sizes:
            begin = inputs[position].data_ptr()
            if any(begin < last and first < begin + size for first, last in self._written_spans):
                return True
        return False


def swap(
    region: Region,
    candidate: Candidate,
    device: torch.device,
    *,
    strictness: str = "warn",
    options: Mapping[str, Any] | None = None,
    around: Around | None = None,
    compiled: Runner | None = None,
) -> Swapped:
    """Build `candidate` for `region` on `device`. `options` are the user's Inductor options;
    `compiled` is another swap's runner of the same Program without a CUDA graph. Raises what the
    schedule raises.

    `around` puts something in front of the built callable, such as a check of it; None costs
    nothing.
    """
    # Parameters keep their address, so a CUDA graph may read them in place.
    static = [index for index, role in enumerate(region.roles) if role != "input"]
    runner = build_runner(
        candidate.program,
        candidate.schedule,
        device,
        static=static,
        options=options,
        compiled=compiled,
    )
    telemetry.count("regions_swapped", by=int(candidate.origin != "baseline"))
    swapped = Swapped(region, runner, device, strictness)
    swapped.candidate = candidate.digest
    if around is not None:
        swapped.put_in_front(around)
    # `withdraw` iterates over the set while other threads build models.
    with _lock:
        _in_use.add(swapped)
    return swapped


def withdraw(candidate: str, reason: str) -> int:
    """Make every `Swapped` of this process that runs the candidate with the digest `candidate` run
    its reference from now on. Returns how many there were.
    """
    with _lock:
        withdrawn_swaps = [swapped for swapped in _in_use if swapped.candidate == candidate]
        listening = [call for listener in _listeners if (call := listener()) is not None]
    # Outside of the lock: a listener may swap or withdraw in turn.
    for swapped in withdrawn_swaps:
        # The first reason stays: later ones follow from it.
        swapped.quarantined = swapped.quarantined or reason
    for call in listening:
        call(candidate, reason)
    return len(withdrawn_swaps)


def on_withdrawal(listener: Callable[[str, str], None]) -> None:
    """Call `listener` (a bound method, held weakly) with the candidate's digest and the reason
    after each withdrawal.
    """
    with _lock:
        # References of dead listeners would pile up in a long-lived process.
        _listeners[:] = [listener for listener in _listeners if listener() is not None]
        _listeners.append(weakref.WeakMethod(listener))


def reorder_inputs(swapped: Positional, order: Sequence[int]) -> Positional:
    """`swapped` for callers that pass the graph's placeholders: `order[i]` is the placeholder of
    the region's input i.
    """
    # The common case: a slice costs less per call than a gather.
    if tuple(order) == tuple(range(len(order))):
        return lambda inputs: swapped(inputs[: len(order)])
    return lambda inputs: swapped([inputs[position] for position in order])
