"""Recalls, in a later process, what AOTAutograd made of Dynamo's graph, so that a start on a warm
cache does not trace it again.

        Dynamo's graph ──digest──> record: region's key, order of inputs ──> entry: the region's Program

Only for the simplest graphs: one inference graph that writes to nothing and hands out fresh memory.
The Program is the one that the entry runs, and the first call compares what it computes with the
own operators of Dynamo's graph (`api.shadow.check_recalled`): a record is a hint, never a proof.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch._functorch import config as functorch_config

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.version import __version__
from torch_cudal1.graph.capture import CapturedGraph, TracedModule
from torch_cudal1.graph.graph_digest import compute_graph_digest
from torch_cudal1.graph.lower import LoweredRegion
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Region
from torch_cudal1.store.context import TuneContext

__all__ = [
    "CaptureRecord",
    "RecalledGraph",
    "describe_capture",
    "list_trace_switches",
    "read_capture",
    "store_program",
]

# Raised when records of before must not be read.
_FORM = 1


@dataclass(frozen=True, eq=False)
class RecalledGraph:
    """What stands for a trace: the one graph, of which only inputs are known, and `call`, once
    `fill` has given it its callable. It writes to nothing.
    """

    region: LoweredRegion
    graph: CapturedGraph
    direct: bool = True
    is_pure: bool = True
    written: frozenset[int] = frozenset()
    mutated_inputs: frozenset[int] = frozenset()
    replay_writes: frozenset[int] | None = frozenset()
    _slot: list[Callable[[Sequence[Any]], Sequence[Any]]] = field(default_factory=list)

    @property
    def graphs(self) -> tuple[CapturedGraph, ...]:
        """The graph, as those of a trace."""
        return (self.graph,)

    def fill(self, kind: str, run: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """Let `run`, which takes the graph's placeholders in one sequence, be the graph."""
        self._slot[:] = [run]

    def call(self, *inputs: Any) -> Sequence[Any]:
        """Inputs of Dynamo's graph in, its outputs out."""
        (run,) = self._slot
        return run([inputs[origin] for origin in self.graph.origins if isinstance(origin, int)])


def describe_capture(
    traced: TracedModule | RecalledGraph, regions: Sequence[LoweredRegion]
) -> dict[str, Any] | Refusal:
    """How the region of a trace sits in Dynamo's graph, where that is all there is to know."""
    if not traced.direct or not traced.is_pure or is_random_program(regions[0].region.program):
        return Refusal("a call does more than compute fresh tensors")
    (item,), (graph,) = regions, traced.graphs
    return {
        "region": item.region.key,
        "order": list(item.order),
        "origins": list(graph.origins),
        "static": sorted(graph.static),
    }


def read_capture(
    record: Mapping[str, Any], input_count: int, region_name: str, context: TuneContext
) -> RecalledGraph | Refusal:
    """What `describe_capture` said of a graph of `input_count` inputs, or why it cannot be used."""
    try:
        key, order = str(record["region"]), tuple(int(number) for number in record["order"])
        origins = tuple(int(number) for number in record["origins"])
        static = frozenset(int(number) for number in record["static"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return Refusal(f"the record of the capture is damaged: {type(error).__name__}: {error}")
    program = _find_program(key, context)
    if isinstance(program, Refusal):
        return program
    numbers = range(len(origins))
    if not set(order) <= set(numbers) or not set(origins) <= set(range(input_count)):
        return Refusal("the record of the capture names inputs that this graph does not have")
    if len(order) != len(program.inputs):
        return Refusal("the record of the capture is of another Program")
    region = Region(
        program,
        tuple("parameter" if position in static else "input" for position in order),
        name=region_name,
    )
    graph = CapturedGraph("inference", fx.GraphModule({}, fx.Graph()), static, origins)
    return RecalledGraph(LoweredRegion(region, order), graph)


def store_program(region: Region, context: TuneContext) -> None:
    """Keep the region's own Program where its entry holds another one: a kernel runs there, or
    blocks with kernels.
    """
    hit = context.cache.get(region.key, context.target, context.contract)
    if isinstance(hit, Refusal) or hit.entry.choice.program.digest == region.key:
        return
    # Records hold no tensors.
    if not region.program.all_payloads():
        value = {"program": region.program.to_json()}
        name = _name_program(region.key)
        context.cache.put_decision_record(name, value, context.target, context.contract)


def _find_program(key: str, context: TuneContext) -> Program | Refusal:
    """The own Program of the region with that key."""
    hit = context.cache.get(key, context.target, context.contract)
    if isinstance(hit, Refusal):
        return hit
    program = hit.entry.choice.program
    if program.digest == key:
        return program
    record = context.find_decision_record(_name_program(key))
    if isinstance(record, Refusal):
        return Refusal(
            f"the entry holds another Program than the region's own, whose: {record.reason}"
        )
    try:
        program = Program.from_json(record["program"], {})
    except (ProgramError, LookupError, TypeError, ValueError, AttributeError) as error:
        return Refusal(f"the stored Program: {type(error).__name__}: {error}")
    return program if program.digest == key else Refusal("the stored Program is another one")


def _name_program(key: str) -> str:
    return hashlib.sha256(f"program {key}".encode()).hexdigest()


def list_trace_switches(context: TuneContext) -> list[str]:
    """All that AOTAutograd's trace of a graph depends on, besides the graph and its inputs."""
    attention = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
    return [
        f"capture {_FORM} {__version__}",
        repr(attention),
        repr(sorted(functorch_config.get_config_copy().items(), key=str)),
        repr(context.target),
    ]


@dataclass(frozen=True, eq=False)
class CaptureRecord:
    """What the cache of `context` says of Dynamo's graph `graph`, called with `inputs`."""

    graph: fx.GraphModule
    inputs: Sequence[Any]
    context: TuneContext

    def remember(self, traced: TracedModule, regions: Sequence[LoweredRegion]) -> None:
        """Note how the graph's region sits in it, where that is all there is to know."""
        value, name, context = describe_capture(traced, regions), self._name, self.context
        if isinstance(name, Refusal) or isinstance(value, Refusal):
            return
        if context.cache.get_decision_record(name, context.target, context.contract) != value:
            context.cache.put_decision_record(name, value, context.target, context.contract)
            store_program(regions[0].region, context)

    def recall(self, region_name: str) -> RecalledGraph | Refusal:
        """The graph's region, as an earlier process found it, or why the graph must be traced."""
        name, context = self._name, self.context
        if isinstance(name, Refusal):
            return name
        record = context.find_decision_record(name)
        if isinstance(record, Refusal):
            return record
        return read_capture(record, len(self.inputs), region_name, context)

    @cached_property
    def _name(self) -> str | Refusal:
        """The record's name: all that AOTAutograd's trace of the graph depends on."""
        # A subclass may hold its numbers elsewhere, in another form: only AOTAutograd knows how. A
        # fake tensor is one, and the backend may be given numbers.
        if not all(type(item) in (torch.Tensor, torch.nn.Parameter) for item in self.inputs):
            return Refusal("an input is a tensor subclass, or no tensor")
        # Only an inference graph has a record, and a graph of tensors that want gradients is none.
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs):
            return Refusal("a training step is traced")
        digest = compute_graph_digest(
            self.graph, self.inputs, extra=list_trace_switches(self.context)
        )
        if isinstance(digest, Refusal):
            return digest
        return hashlib.sha256(f"capture {digest}".encode()).hexdigest()
