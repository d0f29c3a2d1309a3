"""The backend's last gate: what was chosen beside Inductor's own result, in the process that will
run it.

The race was run in another process, on a Program made of this graph. So that nobody who asks for
torch.compile gets less than that, what won there must not lose here. In training a whole step is
what counts, forward and backward together; it has no race, so it is measured here, eager's too.
This chooses nothing else and stores nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from torch_cudal1.api.trial_step import copy_of, gradients
from torch_cudal1.core import telemetry
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.device.gpu_lock import exclusive
from torch_cudal1.graph.functional_module import random_kept
from torch_cudal1.graph.swap import FAILURES
from torch_cudal1.judge.benchmark.protocol import sample_pairs
from torch_cudal1.judge.benchmark.statistics import PairedSummary, summarise

__all__ = ["Graph", "better", "faster_step"]

_BUDGET_S = 3.0
_PLAIN = {
    torch.Tensor,
    torch.nn.Parameter,
}  # no subclass: it may do anything, and a fake one cannot be called
_Call: TypeAlias = Callable[..., Any]  # takes the graph's inputs one by one


@dataclass(frozen=True)
class Graph:
    """What is known of a Dynamo graph. `inductor`: compiles it. `pure`: it writes to nothing.
    `raced`: Inductor had a race.
    """

    inputs: Sequence[Any]
    device: torch.device
    inductor: Callable[[], _Call]
    pure: bool
    raced: bool

    @property
    def callable_here(self) -> bool:
        """Whether it may be called for the sake of measuring."""
        return self.pure and not any(isinstance(item, FakeTensor) for item in self.inputs)


def better(graph: Graph, ours: Callable[[Callable[[], _Call]], _Call]) -> tuple[str, _Call]:
    """ "ours" or "inductor", and its callable. `ours` makes ours; it may ask for what Inductor
    compiled.

    Inductor runs if it is the faster here; where the graph cannot be called, and so not measured,
    if the race had no word of it. Where it cannot compile the graph at all, ours runs.
    """
    if graph.raced and not graph.callable_here:
        return "ours", ours(graph.inductor)
    compiled = _compiled(graph)
    if compiled is None:
        return "ours", ours(graph.inductor)
    if not graph.callable_here:
        telemetry.record(
            "judge",
            "in_place",
            runs="inductor",
            reason="Inductor had no race, and here nothing can be measured",
        )
        return "inductor", compiled
    call = ours(lambda: compiled)
    found = _measured(graph, compiled, call)
    runs = "ours" if found.speedup >= 1.0 else "inductor"
    telemetry.record(
        "judge", "in_place", runs=runs, speedup=found.speedup, low=found.low, high=found.high
    )
    return runs, call if runs == "ours" else compiled


def faster_step(
    graph: Graph, ours: _Call, written: frozenset[int], *, floor: float = 1.0
) -> tuple[str, _Call]:
    """ "ours" or "inductor", and its callable: by a training step of both, forward and backward, on
    leaves of their own.

    Inputs in `written`, which the graph writes to, and all that need no gradient are copied; of the
    others the memory is shared and only read, and no hook of the user's sees their gradients. Ours
    runs where its speed-up is at least `floor`. Where a step cannot be made, Inductor runs; where
    Inductor cannot compile the graph, ours.
    """
    compiled = _compiled(graph)
    if compiled is None:
        return "ours", ours
    try:
        found = _timed_step(graph, compiled, ours, written)
    except (*FAILURES, TimeoutError) as error:
        if is_sticky(error):
            raise
        telemetry.record(
            "judge",
            "in_place",
            runs="inductor",
            reason=f"{type(error).__name__}: {error}".splitlines()[0],
        )
        return "inductor", compiled
    runs = "ours" if found.speedup >= floor else "inductor"
    telemetry.record(
        "judge", "in_place", runs=runs, speedup=found.speedup, low=found.low, high=found.high
    )
    return runs, ours if runs == "ours" else compiled


def _timed_step(
    graph: Graph, compiled: _Call, ours: _Call, written: frozenset[int]
) -> PairedSummary:
    """Paired times of a training step of Inductor's result and of ours; random generators are as
    before.

    Raises TypeError for a tensor subclass, and TimeoutError where a step alone takes the whole
    budget.
    """
    kinds = {type(item) for item in graph.inputs if isinstance(item, torch.Tensor)} - _PLAIN
    if kinds:
        raise TypeError(
            f"expected plain tensors, got {', '.join(sorted(kind.__name__ for kind in kinds))}"
        )
    device = graph.device
    devices = [device.index or 0] if device.type == "cuda" else []
    with (
        tracing(None),
        unset_fake_temporarily(),
        _own_metrics(),
        torch.enable_grad(),
        exclusive(device, "gate"),
    ):
        leaves = [_leaf(item, position in written) for position, item in enumerate(graph.inputs)]
        wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

        def step(call: _Call) -> Callable[[], Any]:
            return lambda: gradients(call(*leaves), wanted)

        with torch.random.fork_rng(devices, device_type="cuda"), random_kept():
            if all(
                _seconds(step(ours), device) > _BUDGET_S for _ in range(2)
            ):  # the first may compile
                raise TimeoutError(f"one step takes more than {_BUDGET_S:g} s")
            return summarise(sample_pairs(step(compiled), step(ours), device, budget_s=_BUDGET_S))


@contextmanager
def _own_metrics() -> Iterator[None]:
    """Lets a backward be compiled inside the compilation of a frame, whose counters PyTorch would
    refuse to set anew.
    """
    from torch._dynamo.metrics_context import MetricsContext
    from torch._dynamo.utils import _metrics_context_tls as local

    outer = getattr(local, "metrics_context", None)
    local.metrics_context = MetricsContext(on_exit=lambda *_, **__: None)
    try:
        yield
    finally:
        del local.metrics_context
        if outer is not None:
            local.metrics_context = outer


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    begin = time.monotonic()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - begin


def _leaf(item: Any, copied: bool) -> Any:
    """What stands in for an input: a leaf that wants a gradient if the input does."""
    if not isinstance(item, torch.Tensor):
        return item
    if copied or not item.requires_grad:
        return copy_of(item)
    return item.detach().requires_grad_()


def _compiled(graph: Graph) -> _Call | None:
    """What Inductor made of the graph; None where it cannot compile it."""
    try:
        return graph.inductor()
    except FAILURES as error:
        if is_sticky(error):
            raise
        telemetry.record(
            "judge",
            "in_place",
            runs="ours",
            reason=f"Inductor: {type(error).__name__}: {error}".splitlines()[0],
        )
        return None


def _measured(graph: Graph, compiled: _Call, call: _Call) -> PairedSummary:
    """Paired times of both on the user's inputs. This may run while Dynamo traces, whose fake mode
    must not leak into the calls.
    """
    inputs = graph.inputs
    with tracing(None), unset_fake_temporarily(), torch.no_grad(), exclusive(graph.device, "gate"):
        return summarise(
            sample_pairs(
                lambda: compiled(*inputs), lambda: call(*inputs), graph.device, budget_s=_BUDGET_S
            )
        )
