"""Captures ATen graphs with AOTAutograd: forward, backward or inference, functional, without
decompositions.

`trace` leaves the caller's module untouched and traces once: the graphs it shows are the graphs
that run when their callables are filled in. It chooses nothing.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from torch_cudal1.core.errors import GraphBreakError, NotLowerableError
from torch_cudal1.core.gc_pause import pause_gc
from torch_cudal1.graph.seeds import remove_undefined_seeds
from torch_cudal1.ir.ops.attention_masks import lay_out_masks
from torch_cudal1.ir.ops.grouped_mm import replace_library_operators
from torch_cudal1.ir.ops.recurrent_ops import OneStepRecurrence
from torch_cudal1.ir.records import Kind
from torch_cudal1.runtime.index_checks import find_lost_check

__all__ = [
    "CapturedGraph",
    "TracedModule",
    "find_lifted_parameters",
    "is_dynamic",
    "keep_backward_repeatable",
    "trace",
]

# Outputs that share memory with no tensor of the user's.
_FRESH_OUTPUT_TYPES = (
    OutputType.non_alias,
    OutputType.unsafe_view_alias,
)
# Namespaces of operators that compute and do nothing else.
_PURE_NAMESPACES = frozenset({"aten", "prims", "cudal1"})
# The compiled callable takes one sequence of inputs.
_GraphCompiler: TypeAlias = Callable[[fx.GraphModule, Kind], Callable[..., Any]]


@dataclass(frozen=True)
class CapturedGraph:
    """One functional ATen graph.

    `static` are the placeholder positions of parameters and buffers. `origins` says where each
    placeholder comes from: the name of a parameter or buffer, the number of a plain input, or None
    (saved for the backward, tangents). `writes` are the origins of the inputs that the call writes
    to: their new values are among the outputs.
    """

    kind: Kind
    module: fx.GraphModule
    static: frozenset[int]
    origins: tuple[str | int | None, ...]
    writes: tuple[str | int, ...] = ()


def is_dynamic(inputs: Sequence[Any]) -> bool:
    """Whether any input is a symbolic integer or has a symbolic size."""
    return any(
        isinstance(item, torch.SymInt)
        or (isinstance(item, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in item.shape))
        for item in inputs
    )


def find_lifted_parameters(module: torch.nn.Module) -> frozenset[int]:
    """Positions of parameters and buffers that Dynamo lifted to inputs, by the mark it leaves on
    them.
    """
    if not isinstance(module, fx.GraphModule):
        return frozenset()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return frozenset(
        i
        for i, node in enumerate(placeholders)
        if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})
    )


@dataclass(frozen=True)
class TracedModule:
    """The graphs of a module, and `call`: the whole, flat tensors in and out, once `fill` has given
    each graph its callable.
    """

    graphs: tuple[CapturedGraph, ...]
    call: Callable[..., Any]
    # Filled later: tracing shows the graphs, and the decision about them comes after.
    _slots: dict[Kind, Callable[[Sequence[Any]], Sequence[Any]]]
    _context: TracingContext

    def fill(self, kind: Kind, run: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """Let `run`, which takes a graph's placeholders in one sequence, be the graph of that kind."""
        self._slots[kind] = run

    @property
    def direct(self) -> bool:
        """Whether the one graph may be called in place of the whole: it writes to no input, its
        outputs are all fresh memory.
        """
        (graph, *more), metadata = self.graphs, self._context.fw_metadata
        if (
            more
            or metadata is None
            or graph.kind != "inference"
            or graph.writes
            or None in graph.origins
        ):
            # Skipping AOTAutograd's wrapper is safe only where that does nothing but pass tensors
            # on.
            return False
        (output,) = (node for node in graph.module.graph.nodes if node.op == "output")
        infos = metadata.output_info
        return len(infos) == len(output.args[0]) and all(
            info.output_type in _FRESH_OUTPUT_TYPES for info in infos
        )

    @property
    def is_pure(self) -> bool:
        """Whether `call` is nothing but one inference graph: no input written to, no output that
        shares memory with anything.
        """
        notes = self._context.fw_metadata
        graph = self.graphs[0]
        aliased = (
            notes is None or notes.num_outputs_aliased or notes.num_mutated_inp_runtime_indices
        )
        alone = (
            len(self.graphs) == 1 and graph.kind == "inference" and not graph.writes and not aliased
        )
        return alone and not _has_shared_outputs(graph.module)

    @property
    def mutated_inputs(self) -> frozenset[int]:
        """Positions of the inputs that `call` writes to by AOTAutograd's notes: also those that it
        traced as one tensor, of which no graph names an input.
        """
        notes = self._context.fw_metadata
        return frozenset(() if notes is None else notes.mutated_inp_runtime_indices)

    @property
    def replay_writes(self) -> frozenset[int] | None:
        """Positions of the inputs that `call` writes to, if a CUDA graph may replay it: one inference
        graph without an output in an input's memory, that writes to inputs only. Else None.
        """
        notes, (graph, *more) = self._context.fw_metadata, self.graphs
        if notes is None or more or graph.kind != "inference" or self.replaces_memory:
            return None
        in_input = {OutputType.alias_of_input, OutputType.is_input}
        # A copy would be handed out for it, and a later write to the input would not show there.
        if any(info.output_type in in_input for info in notes.output_info):
            return None
        writes = bool(graph.writes or notes.num_mutated_inp_runtime_indices)
        return self.written if writes else frozenset()

    @property
    def replaces_memory(self) -> bool:
        """Whether `call` gives an input other memory, or another shape of what it has."""
        notes = self._context.fw_metadata
        return notes is None or any(
            # `resize_`, `t_` and `set_` change a tensor that the caller holds.
            info.mutates_metadata or info.mutates_storage_metadata
            for info in notes.input_info
        )

    @property
    def written(self) -> frozenset[int] | None:
        """Positions of the inputs that `call` writes to; None where it may do more than that: by an
        operator that is not PyTorch's own, a graph inside the graph, or a tensor that is no input.
        """
        notes = self._context.fw_metadata
        nodes = [node for graph in self.graphs for node in graph.module.graph.nodes]
        # A get_attr is a constant or a subgraph, and either may be written to.
        if notes is None or any(node.op == "get_attr" or not _is_pure_call(node) for node in nodes):
            return None
        named = {origin for graph in self.graphs for origin in graph.writes}
        # A name is a buffer of the traced module, which the caller does not pass.
        if not all(isinstance(origin, int) for origin in named):
            return None
        return frozenset(
            {origin for origin in named if isinstance(origin, int)}
            | set(notes.mutated_inp_runtime_indices)
        )


def _is_pure_call(node: fx.Node) -> bool:
    """Whether it calls nothing but an operator of PyTorch's own."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "call_module"
    return (
        isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _PURE_NAMESPACES
    )


@pause_gc()
def trace(module: torch.nn.Module, inputs: Sequence[Any]) -> TracedModule:
    """The ATen graphs of `module` at `inputs` (real or fake tensors): (inference,) or (forward,
    backward).

    `module` is a Dynamo graph, or any module that takes and returns flat tensors; its parameters
    become inputs. Raises NotLowerableError when AOTAutograd cannot trace it; nothing of the
    caller's tracing state is changed.
    """
    # `one_hot` looks at its class values and raises in eager. The trace would not.
    if problem := find_lost_check(module):
        raise NotLowerableError(problem.reason)
    # Asked before tracing: AOTAutograd's graph has other placeholders without Dynamo's mark.
    static = find_lifted_parameters(module)
    graphs: list[CapturedGraph] = []
    slots: dict[Kind, Callable[[Sequence[Any]], Sequence[Any]]] = {}

    # A late-bound slot: AOTAutograd wants a callable now, and the choice is made later.
    def keep(graph: fx.GraphModule, kind: Kind) -> Any:
        if kind != "backward":  # that one was kept when the joint graph was cut
            graphs.append(
                CapturedGraph(
                    kind,
                    graph,
                    _find_static_inputs(graph, static),
                    _list_origins(graph),
                    _list_writes(graph),
                )
            )
        return lambda inputs: slots[kind](inputs)

    def partition(
        joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        # Before the cut, which decides what the forward saves for the backward.
        remove_undefined_seeds(joint)
        forward, backward = _partition(joint, joint_inputs, **kwargs)
        graphs.append(
            # A copy: AOTAutograd goes on to edit the graph that it was given back.
            CapturedGraph("backward", _copy_graph(backward), frozenset(), _list_origins(backward))
        )
        return forward, backward

    # A context of our own, with the caller's fake mode: AOTAutograd leaves notes in the context it
    # runs in. And the grad mode that the graph sets: who traces next would not see the graph change
    # it.
    grad_enabled = torch.set_grad_enabled(torch.is_grad_enabled())
    try:
        with (
            grad_enabled,
            _enter_fake_mode(inputs) as mode,
            tracing(context := TracingContext(mode)),
        ):
            call = _trace(_copy_graph(module), _make_fakes(inputs, mode), keep, partition)
    except DataDependentOutputException as error:  # `.item()`, which Dynamo may put into a graph
        raise GraphBreakError(f"it asks a tensor for its value ({error.func})") from error
    # What AOTAutograd and fake kernels raise for operators that they cannot trace.
    except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
        raise NotLowerableError(
            f"AOTAutograd cannot trace it: {type(error).__name__}: {_format_error_line(error)}"
        ) from error
    return TracedModule(
        # The backward is appended first, as the joint graph is cut before the forward is compiled.
        tuple(sorted(graphs, key=lambda graph: graph.kind == "backward")),
        call,
        slots,
        context,
    )


@contextmanager
def _enter_fake_mode(inputs: Sequence[Any]) -> Iterator[FakeTensorMode]:
    """The fake mode of the inputs, or a new one.

    A mode keeps weak references to the weights for as long as a fake tensor lives, and
    `torch.utils.swap_tensors` refuses weights that have a weak reference. A new mode drops them at
    the end.
    """
    detected_mode = detect_fake_mode(list(inputs))
    mode = detected_mode or FakeTensorMode()
    try:
        yield mode
    finally:
        # A mode of the caller keeps its converter: the caller's fakes are known to it.
        if detected_mode is None:
            mode.fake_tensor_converter = type(mode.fake_tensor_converter)()


def _copy_graph(module: Any) -> Any:
    """A graph of its own, since tracing may edit it, over the same constants: a fake mode cannot
    copy those. Any other module is only called.
    """
    if not isinstance(module, fx.GraphModule):
        return module
    # `GraphModule(module, graph)` takes over the attributes that the graph refers to.
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    copied.meta.update(module.meta)
    replace_library_operators(copied.graph)
    lay_out_masks(copied.graph)
    return copied


def _trace(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    compiler: _GraphCompiler,
    partition: Callable[..., Any],
) -> Any:
    def of(kind: Kind) -> Callable[..., Any]:
        def compile_graph(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
            compiled = compiler(graph, kind)
            # AOTAutograd calls a boxed function with one list of arguments.
            return make_boxed_func(lambda *args: compiled(args))

        return compile_graph

    # AOTAutogradCache knows a graph by its form, not by its compiler: a user who forces it on must
    # not make us share Inductor's.
    with (
        functorch_config.patch(force_autograd_cache=False),
        keep_backward_repeatable(),
        OneStepRecurrence(),
    ):
        return aot_module_simplified(
            module,  # type: ignore[arg-type]  # any module with flat tensors in and out works
            list(inputs),
            fw_compiler=of("forward"),
            bw_compiler=of("backward"),
            inference_compiler=of("inference"),
            partition_fn=partition,
            # A decomposed operator would hide from the rules what the user called, such as a
            # softmax.
            decompositions={},
            # A region is functional: AOTAutograd's epilogue makes the writes after it.
            keep_inference_input_mutations=False,
        )


@contextmanager
def keep_backward_repeatable() -> Iterator[None]:
    """Have AOTAutograd compile a step whose backward may run again (`retain_graph=True`), as
    eager's may. Otherwise a backward that ran once without being retained writes over what the
    forward saved, and a later one that is to be retained raises.

    For the compilation of one graph, inside a TracingContext. AOTAutograd's cache is left out: what
    it returns cannot be mended. Without gradients there is no backward, and the cache serves.
    """
    if not torch.is_grad_enabled():
        yield
        return
    # A donated buffer is one that the backward may overwrite.
    with functorch_config.patch(donated_buffer=False, enable_autograd_cache=False):
        yield
        context = TracingContext.try_get()
        metadata = None if context is None else context.fw_metadata
        # AOTAutograd reads None, the value where no analysis ran, as "some are donated", and
        # refuses `retain_graph`.
        if metadata is not None and metadata.bw_donated_idxs is None:
            metadata.bw_donated_idxs = []


def _partition(
    joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    forward, backward = min_cut_rematerialization_partition(
        # Inductor's cut, so that forward and backward are those of torch.compile, which is the
        # baseline.
        joint,
        joint_inputs,
        compiler="inductor",
        **kwargs,
    )
    return forward, backward


def _make_fakes(inputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Static fakes of the inputs: AOTAutograd would give real tensors symbolic sizes in a context
    that Dynamo did not prepare.
    """
    return [
        # Static: a region's key holds exact sizes.
        mode.from_tensor(item, static_shapes=True)
        if isinstance(item, torch.Tensor) and not isinstance(item, FakeTensor)
        else item
        for item in inputs
    ]


def _find_static_inputs(graph: fx.GraphModule, lifted: frozenset[int]) -> frozenset[int]:
    """Parameter and buffer positions in the ATen graph, by AOTAutograd's own description of its
    inputs.
    """
    positions = set()
    for position, node in enumerate(node for node in graph.graph.nodes if node.op == "placeholder"):
        origin = node.meta.get("desc")
        if (
            # By name: the classes of AOTAutograd's descriptors are private.
            type(origin).__name__ in ("ParamAOTInput", "BufferAOTInput")
            or getattr(origin, "idx", None) in lifted
        ):
            positions.add(position)
    return frozenset(positions)


def _list_origins(graph: fx.GraphModule) -> tuple[str | int | None, ...]:
    origins = [node.meta.get("desc") for node in graph.graph.nodes if node.op == "placeholder"]
    return tuple(getattr(origin, "target", getattr(origin, "idx", None)) for origin in origins)


def _list_writes(graph: fx.GraphModule) -> tuple[str | int, ...]:
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    # AOTAutograd returns a written input's new value as an output, and says so in `desc`.
    inputs = [getattr(item, "mutated_input", None) for item in output.meta.get("desc") or ()]
    origins = [getattr(item, "target", getattr(item, "idx", None)) for item in inputs]
    return tuple(origin for origin in origins if origin is not None)


def _has_shared_outputs(graph: fx.GraphModule) -> bool:
    """Whether two outputs are views of one tensor, which AOTAutograd does not note where no
    gradient is asked.
    """
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    values = [node.meta["val"] for node in output.args[0] if isinstance(node, fx.Node)]
    storages = [
        # The storage's address in C++: fake tensors have no data pointer.
        value.untyped_storage()._cdata
        for value in values
        if isinstance(value, torch.Tensor)
    ]
    return len(set(storages)) < len(storages)


def _format_error_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else ""
