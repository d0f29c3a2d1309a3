"""The backend's last gate: what was chosen beside Inductor's own result, in the process that will run it.

The race was run in another process, on a Program made of this graph. So that nobody who asks for torch.compile gets less than that,
what won there must not lose here. It chooses nothing else and stores nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from torch_cudal1 import observe
from torch_cudal1.graph.swap import FAILURES, is_sticky
from torch_cudal1.judge.gpu_lock import exclusive
from torch_cudal1.judge.measure import sample_pairs
from torch_cudal1.judge.statistics import PairedSummary, summarise

__all__ = ["Graph", "better"]

_BUDGET_S = 3.0
_Call: TypeAlias = Callable[..., Any]  # takes the graph's inputs one by one


@dataclass(frozen=True)
class Graph:
    """What is known of a Dynamo graph. `inductor`: compiles it. `pure`: it writes to nothing. `raced`: Inductor had a race."""

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
    """ "ours" or "inductor", and its callable. `ours` makes ours; it may ask for what Inductor compiled.

    Inductor runs if it is the faster here; where the graph cannot be called, and so not measured, if the race had no word of it.
    Where it cannot compile the graph at all, ours runs.
    """
    if graph.raced and not graph.callable_here:
        return "ours", ours(graph.inductor)
    try:
        compiled = graph.inductor()
    except FAILURES as error:
        if is_sticky(error):
            raise
        observe.record("judge", "in_place", runs="ours", reason=f"Inductor: {type(error).__name__}: {error}".splitlines()[0])
        return "ours", ours(graph.inductor)
    if not graph.callable_here:
        observe.record("judge", "in_place", runs="inductor", reason="Inductor had no race, and here nothing can be measured")
        return "inductor", compiled
    call = ours(lambda: compiled)
    found = _measured(graph, compiled, call)
    runs = "ours" if found.speedup >= 1.0 else "inductor"
    observe.record("judge", "in_place", runs=runs, speedup=found.speedup, low=found.low, high=found.high)
    return runs, call if runs == "ours" else compiled


def _measured(graph: Graph, compiled: _Call, call: _Call) -> PairedSummary:
    """Paired times of both on the user's inputs. This may run while Dynamo traces, whose fake mode must not leak into the calls."""
    inputs = graph.inputs
    with tracing(None), unset_fake_temporarily(), torch.no_grad(), exclusive(graph.device):
        return summarise(sample_pairs(lambda: compiled(*inputs), lambda: call(*inputs), graph.device, budget_s=_BUDGET_S))
