"""Recalls, in a later process, how a call of a module is bound, so that a start on a warm cache
needs neither Dynamo nor AOTAutograd.

        module, arguments ──digest──> record: state's digest, region's key, where inputs and results lie

The record serves the same program started again (`core.program_text`), for a call whose module, and
whatever else Dynamo guarded, is in the state in which an earlier process captured it
(`runtime.record_digest`). It is a hint all the same: the call's results
are compared with those of the module's own forward, which runs twice meanwhile; the form of the
result is learnt from that too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from torch_cudal1.api.signatures.known_calls import compute_call_digest
from torch_cudal1.api.signatures.recalled_capture import (
    RecalledGraph,
    describe_capture,
    list_trace_switches,
    read_capture,
    store_program,
)
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.program_text import compute_program_digest
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.capture import TracedModule
from torch_cudal1.graph.dynamo_guard_records import UnprovenError
from torch_cudal1.graph.dynamo_session import settle_dynamo
from torch_cudal1.graph.lower import LoweredRegion
from torch_cudal1.graph.module_call import ModuleCall, list_call_tensors
from torch_cudal1.graph.outputs import iter_leaves, make_template
from torch_cudal1.graph.stored_guards import PresentGuards, StoredGuards, read_stored_guards
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.guard_builder import record_module
from torch_cudal1.runtime.record_digest import compute_record_digest
from torch_cudal1.store.context import TuneContext

__all__ = ["CachedCall", "RecalledCall"]

# Raised when records of before must not be read.
_FORM = 2
# What a damaged record, or one of another state, may raise.
_UNREADABLE = (
    UnprovenError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
)


@dataclass(frozen=True)
class RecalledCall:
    """A call as `capture_module_call` would show it, its graph, and the graph's outputs as the
    module's own forward computed them. The graph of `captured` is empty.
    """

    captured: ModuleCall
    graph: RecalledGraph
    outputs: Sequence[torch.Tensor]


class _Output:
    """Stands for an output of the graph in a result."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, eq=False)
class CachedCall:
    """What the cache of `context` says of a call of `module`."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: TuneContext

    def remember(
        self,
        captured: ModuleCall,
        traced: TracedModule | RecalledGraph,
        regions: Sequence[LoweredRegion],
    ) -> None:
        """Note how this call was captured, where another process can repeat that without a
        capture.
        """
        capture, stored = describe_capture(traced, regions), captured.stored
        obstacle = next((item for item in (capture, stored) if isinstance(item, Refusal)), None)
        if not captured.guard.holds():
            obstacle = Refusal("the module has changed since it was captured")
        context, name = self.context, self.name
        if isinstance(name, Refusal):
            obstacle = name
        try:
            state = None if obstacle else self._digest_state(stored)
            outputs = None if obstacle else _list_output_numbers(captured)
        except (*_UNREADABLE, NotLowerableError) as error:
            obstacle = Refusal(f"{type(error).__name__}: {error}")
        if obstacle is not None:
            telemetry.record("capture", "not_stored", reason=obstacle.reason)
            return
        assert isinstance(stored, StoredGuards)
        value = {"capture": capture, "state": state, "outputs": outputs, **stored.to_json()}
        assert isinstance(name, str)
        if context.cache.get_decision_record(name, context.target, context.contract) != value:
            context.cache.put_decision_record(name, value, context.target, context.contract)
            store_program(regions[0].region, context)

    def recall(self) -> RecalledCall | Refusal:
        """The call as an earlier process captured it, or why it must be captured. Runs the module's
        own forward twice.
        """
        if isinstance(self.name, Refusal):
            return self.name
        record = self.context.find_decision_record(self.name)
        if isinstance(record, Refusal):
            return record
        try:
            return self._read(record)
        except (*_UNREADABLE, NotLowerableError) as error:
            return Refusal(f"the record of the call: {type(error).__name__}: {error}")

    def _read(self, record: Mapping[str, Any]) -> RecalledCall | Refusal:
        present = self._read_state(StoredGuards.from_json(record))
        if compute_record_digest(present.records) != record["state"]:
            return Refusal("the module is in another state than when it was captured")
        tensors = list_call_tensors(self.args, self.kwargs)
        inputs = [tensors[item] if isinstance(item, int) else item for item in present.placeholders]
        if not all(type(item) in (torch.Tensor, torch.nn.Parameter) for item in inputs):
            return Refusal("an input is a tensor subclass, or no tensor")
        name = f"{type(self.module).__name__}.inference"
        graph = read_capture(record["capture"], len(inputs), name, self.context)
        if isinstance(graph, Refusal):
            return graph
        numbers = [int(number) for number in record["outputs"]]
        results = tuple(self.module._call_impl(*self.args, **self.kwargs) for _ in range(2))
        markers = [_list_outputs(result, numbers) for result in results]
        template = make_template((results[0], results[1]), markers, tensors, {}, {})
        if template.uses_arguments:
            return Refusal("the result holds an argument")
        scope = {"module": self.module, "args": self.args, "kwargs": self.kwargs}
        if present.check is not None and not present.check(scope):
            return Refusal("an argument has other attributes, or a property changed")
        captured = ModuleCall(
            fx.GraphModule({}, fx.Graph()),
            tuple(inputs),
            ModuleGuard(present.records),
            present.check,
            present.placeholders,
            template,
            "",
            None,
            self.module,
            {},
            Refusal("recalled"),
        )
        return RecalledCall(captured, graph, markers[0])

    def _digest_state(self, stored: StoredGuards | Refusal) -> str:
        assert isinstance(stored, StoredGuards)
        return compute_record_digest(self._read_state(stored).records)

    def _read_state(self, stored: StoredGuards) -> PresentGuards:
        # As before a capture: a record of the class that was taken before would differ.
        settle_dynamo()
        walked = record_module(self.module)
        if isinstance(walked, Refusal):
            raise ValueError(walked.reason)
        return read_stored_guards(stored, self.module, walked)

    @cached_property
    def name(self) -> str | Refusal:
        """The record's name: the program, the form of the module and of its arguments, the modes, and
        all that a trace depends on. Asked for first before a capture, which loads modules.
        """
        program = compute_program_digest()
        if isinstance(program, Refusal):
            return program
        parts = [
            f"call {_FORM} {torch.__version__} {program}",
            compute_call_digest(self.module, self.args, self.kwargs),
            *list_trace_switches(self.context),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _list_output_numbers(captured: ModuleCall) -> list[int]:
    """For each tensor of the module's result, in `iter_leaves`'s order, the number of the graph's
    output.
    """
    assert captured.outputs is not None
    (output,) = (node for node in captured.graph.graph.nodes if node.op == "output")
    stand_ins: Any = [_Output(number) for number in range(len(output.args[0]))]
    result = captured.outputs.build(stand_ins, ())
    if next(iter_leaves(result, torch.Tensor), None) is not None:
        raise NotLowerableError("its result holds a tensor that the graph does not compute")
    numbers = [item.number for item in iter_leaves(result, _Output)]
    if set(numbers) != set(range(len(stand_ins))):
        raise NotLowerableError("an output of the graph is no part of the result")
    return numbers


def _list_outputs(result: Any, numbers: Sequence[int]) -> list[torch.Tensor]:
    """The outputs of the graph in the module's own result."""
    leaves = list(iter_leaves(result, torch.Tensor))
    outputs = dict(zip(numbers, leaves, strict=True))
    if [id(outputs[number]) for number in numbers] != [id(leaf) for leaf in leaves]:
        raise ValueError("the result holds its tensors at other places")
    return [outputs[number] for number in range(len(outputs))]
