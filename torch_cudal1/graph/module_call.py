"""One call of a module, captured: its graph, how a later call feeds it and builds the module's
result, and the guards of both.

Two forms. Where every input of the graph is an argument or a tensor that the guard holds by
identity, and the result has a template, a later call needs none of Dynamo's code: that is the form
the C++ fast path takes. Everything else (a cache object among the arguments, a tensor behind a
global name) runs Dynamo's own bytecode under all of Dynamo's guards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.gc_pause import pause_gc
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.addresses import find_address_span, find_overlaps, lie_at
from torch_cudal1.graph.dynamo import DynamoCapture, capture_call
from torch_cudal1.graph.dynamo_guards import GuardSplit
from torch_cudal1.graph.dynamo_session import settle_dynamo
from torch_cudal1.graph.outputs import OutputTemplate, learn_outputs
from torch_cudal1.graph.stored_guards import StoredGuards, encode_guards
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.guard_builder import record_module
from torch_cudal1.runtime.guard_records import GuardRecords

__all__ = [
    "Call",
    "ModuleCall",
    "capture_module_call",
    "list_call_tensors",
    "shares_written_memory",
]

# Takes the user's args and kwargs.
Call: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_Check: TypeAlias = Callable[[dict[str, Any]], bool]


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """`guard` compares the module, `conditions` what else Dynamo guards (None: nothing), given
    {module, args, kwargs}.

    `inputs[i]` is the example tensor of the graph's placeholder i. `sources[i]` is where a later
    call takes it from: the number of a tensor among the arguments, or a tensor of the module;
    `sources` and `outputs` are None in the form that runs bytecode, and `form` says why.
    """

    graph: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    guard: ModuleGuard
    conditions: _Check | None
    sources: tuple[int | torch.Tensor, ...] | None
    outputs: OutputTemplate | None
    form: str
    _bytecode: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    _module: torch.nn.Module
    _passed_through: Mapping[int, int]
    # What another process reads in place of a capture, or why it must capture the call itself.
    stored: StoredGuards | Refusal

    def wrap_compiled(
        self, compiled: Callable[..., Any], written: frozenset[int] = frozenset()
    ) -> Call:
        """A callable with the module's calling convention around `compiled`, which takes and
        returns the graph's tensors, and writes to the placeholders `written`. It keeps neither the
        example tensors nor this.
        """
        sources, outputs, module = self.sources, self.outputs, self._module
        if sources is None or outputs is None:
            assert self._bytecode is not None
            # AOTAutograd compiled for the aliasing of the example. Other aliasing would give other
            # results.
            compiled = _fall_back_on_other_overlaps(compiled, self.graph, self.inputs, written)
            function = self._bytecode(_pass_inputs_through(compiled, self._passed_through))
            return lambda args, kwargs: function(module, args, kwargs)
        # Chosen once, outside of the call.
        build = None if outputs.first else outputs.build

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = list_call_tensors(args, kwargs)
            results = compiled(
                *[tensors[source] if isinstance(source, int) else source for source in sources]
            )
            return results[0] if build is None else build(results, tensors)

        return call

    def make_output_builder(self) -> Callable[[Sequence[Any]], Any] | None:
        """What makes the module's result of the graph's outputs; None if that is the first of them.
        For the form with sources.
        """
        assert self.outputs is not None
        build = self.outputs.build
        return None if self.outputs.first else lambda results: build(results, ())

    def make_overlap_check(self, written: frozenset[int]) -> Call | None:
        """For a graph that writes to the placeholders `written`: whether a call's arguments share
        no memory with the module's tensors where one of them is written. None where no later call
        can differ in that.
        """
        sources = self.sources
        if not written or sources is None:
            return None
        owned = [
            (source, i in written)
            for i, source in enumerate(sources)
            if isinstance(source, torch.Tensor)
        ]
        read = {source: i in written for i, source in enumerate(sources) if isinstance(source, int)}
        # The module's own tensors keep their memory while the guard holds.
        if not owned or not read:
            return None

        def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            tensors = list_call_tensors(args, kwargs)
            spans = [(find_address_span(tensor), is_written) for tensor, is_written in owned]
            for number, argument_is_written in read.items():
                begin, end = find_address_span(tensors[number])
                for (first, last), is_written in spans:
                    # Two reads of one memory are harmless.
                    if (is_written or argument_is_written) and begin < last and first < end:
                        return False
            return True

        return check


@pause_gc()
def capture_module_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ModuleCall:
    """Capture `module(*args, **kwargs)`. Raises NotLowerableError with the reason where the call
    cannot be captured.
    """
    # Before the walk: Dynamo replaces `nn.Module.__init__` at its first use, and a record taken
    # before would differ from then on.
    settle_dynamo()
    # Before the capture, so that a refusal costs no tracing.
    watched = record_module(module)
    if isinstance(watched, Refusal):
        raise NotLowerableError(watched.reason)
    tensors = list_call_tensors(args, kwargs)
    strange = next(
        (tensor for tensor in tensors if tensor.layout != torch.strided or tensor.is_quantized),
        None,
    )
    if strange is not None:
        raise NotLowerableError(
            f"an input is {_describe(strange)}, only plain strided tensors are served"
        )
    capture = capture_call(module, args, kwargs)
    try:
        return _make_module_call(capture, watched, tensors)
    # Also after a refusal: a fake mode's weak references would make `swap_tensors` fail on the
    # user's weights.
    finally:
        capture.release()


def _make_module_call(
    capture: DynamoCapture, watched: GuardRecords, tensors: Sequence[torch.Tensor]
) -> ModuleCall:
    module: torch.nn.Module = capture.locals["module"]
    split, same = GuardSplit(capture, watched), capture.outputs_that_are_inputs
    # This calls `split.keep`, which fills the records that `_find_sources` asks for.
    check = capture.guards(split.keep)
    try:
        sources = _find_sources(capture, split, tensors)
        guarded_tensors = {id(record.tensor): record.tensor for record in watched.tensors}
        outputs = _read_output_template(capture, tensors, guarded_tensors)
    except NotLowerableError as problem:
        # All of Dynamo's guards: the bytecode reads what it likes, so none may be left out.
        guard, check = ModuleGuard(split.merge_records()), capture.guards()
        return ModuleCall(
            capture.graph,
            capture.inputs,
            guard,
            check,
            None,
            None,
            problem.reason,
            capture.function,
            module,
            same,
            Refusal(problem.reason),
        )
    conditions, guard = (check if split.kept_guards else None), ModuleGuard(split.merge_records())
    stored = _store_guards(capture, split, sources, outputs)
    return ModuleCall(
        capture.graph,
        capture.inputs,
        guard,
        conditions,
        sources,
        outputs,
        "",
        None,
        module,
        same,
        stored,
    )


def _store_guards(
    capture: DynamoCapture,
    split: GuardSplit,
    sources: Sequence[int | torch.Tensor],
    outputs: OutputTemplate,
) -> StoredGuards | Refusal:
    if outputs.uses_arguments or capture.outputs_that_are_inputs:
        return Refusal("its result holds tensors that it did not compute")
    return encode_guards(split, sources, capture)


def list_call_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """The tensors of a call in the order of its arguments, as the C++ fast path numbers them."""
    # The common call needs no pytree.
    if not kwargs and all(type(item) is torch.Tensor for item in args):
        return args
    return [
        leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)
    ]


def _find_sources(
    capture: DynamoCapture, split: GuardSplit, tensors: Sequence[torch.Tensor]
) -> tuple[int | torch.Tensor, ...]:
    """Where a later call takes each input from. Raises NotLowerableError where only Dynamo's
    bytecode can tell.
    """
    # Reversed: of a tensor that is passed twice the first position counts.
    numbers = {id(tensor): number for number, tensor in reversed(list(enumerate(tensors)))}
    sources: list[int | torch.Tensor] = []
    for position, (tensor, source) in enumerate(zip(capture.inputs, capture.sources, strict=True)):
        if capture.from_arguments(position):
            if id(tensor) not in numbers:
                raise NotLowerableError(
                    f"{source.name} is a tensor inside an argument that is no plain container"
                )
            sources.append(numbers[id(tensor)])
        # A tensor that is also an argument may be another one in the next call.
        elif split.holds_identity(source) and id(tensor) not in numbers:
            sources.append(tensor)
        else:
            raise NotLowerableError(
                f"{source.name} is a tensor that may be another one in the next call"
            )
    return tuple(sources)


def _read_output_template(
    capture: DynamoCapture,
    tensors: Sequence[torch.Tensor],
    guarded_tensors: Mapping[int, torch.Tensor],
) -> OutputTemplate:
    (output,) = (node for node in capture.graph.graph.nodes if node.op == "output")
    module, args, kwargs = (capture.locals[name] for name in ("module", "args", "kwargs"))
    fixed = {
        number: capture.inputs[position]
        for number, position in capture.outputs_that_are_inputs.items()
    }

    def run(markers: Sequence[torch.Tensor]) -> Any:
        # The bytecode runs with markers in place of the graph, so that no operator of the user's
        # runs.
        return capture.function(lambda *inputs: tuple(markers))(module, args, kwargs)

    return learn_outputs(run, len(output.args[0]), tensors, guarded_tensors, fixed)


def _fall_back_on_other_overlaps(
    compiled: Callable[..., Any],
    graph: fx.GraphModule,
    example: Sequence[torch.Tensor],
    written: frozenset[int],
) -> Callable[..., Any]:
    """`compiled` for inputs that share memory as the example's do, where one of them is written;
    the graph's own operators for others.
    """
    if not written:
        return compiled
    # Dynamo's guards hold, so shapes and strides are the example's, and only addresses can differ.
    sizes = [end - begin for begin, end in map(find_address_span, example)]
    example_addresses = [tensor.data_ptr() for tensor in example]
    expected = find_overlaps(example_addresses, sizes, written)
    # Of the last call that was like the example: most calls pass tensors that lie where they lay.
    known_addresses = example_addresses
    positions = list(range(len(example)))

    def run(*inputs: torch.Tensor) -> Any:
        nonlocal known_addresses
        if not lie_at(inputs, known_addresses, positions):
            addresses = [tensor.data_ptr() for tensor in inputs]
            if find_overlaps(addresses, sizes, written) != expected:
                # The graph's own operators are right for every aliasing.
                return graph(*inputs)
            known_addresses = addresses
        return compiled(*inputs)

    return run


def shares_written_memory(tensors: Sequence[torch.Tensor], written: frozenset[int]) -> bool:
    """Whether a tensor at one of the positions `written` lies, if only in part, in memory of
    another.
    """
    spans = [find_address_span(tensor) for tensor in tensors]
    sizes = [end - begin for begin, end in spans]
    return bool(find_overlaps([begin for begin, _ in spans], sizes, written))


def _pass_inputs_through(
    compiled: Callable[..., Any], outputs: Mapping[int, int]
) -> Callable[..., Any]:
    """`compiled`, with those outputs that are an input's own tensor replaced by that."""
    if not outputs:
        return compiled

    def run(*inputs: torch.Tensor) -> list[Any]:
        results = list(compiled(*inputs))
        for number, position in outputs.items():
            # The caller may compare identity, and eager returns the very tensor.
            results[number] = inputs[position]
        return results

    return run


def _describe(tensor: torch.Tensor) -> str:
    return "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
