"""What may run instead of a module's own forward: builders of the chosen graphs, and of `torch.compile`
of the whole module.

They build; `api.module_trial` measures them, and `api.binding` takes the winner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_cudal1.api.end_to_end import TORCH_COMPILE
from torch_cudal1.api.gradients.double_backward import allow_double_backward
from torch_cudal1.api.inductor import compile_fx_graph, compile_with_inductor
from torch_cudal1.api.shadow import wrap_with_checks
from torch_cudal1.api.signatures.recalled_capture import RecalledGraph
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.capture import TracedModule, find_lifted_parameters
from torch_cudal1.graph.functional_module import list_running_statistics, preserve_versions
from torch_cudal1.graph.lower import LoweredRegion
from torch_cudal1.graph.module_call import Call, ModuleCall
from torch_cudal1.graph.swap import GraphedLater, Swapped, reorder_inputs, swap
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.records import DIFFERS_FROM_EAGER
from torch_cudal1.runtime.dispatch import DirectCall, make_dispatch_table, try_table_first
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.index_checks import cpu_index_checks, raise_as_eager
from torch_cudal1.search.inductor_artifacts import choose_inductor_options, provide_artifacts
from torch_cudal1.search.tune import Choice
from torch_cudal1.store.context import TuneContext

__all__ = [
    "FilledGraphs",
    "ServedCall",
    "build_contenders",
    "fill_graphs",
    "fill_in_place",
    "find_written_placeholders",
]


def build_contenders(
    module: torch.nn.Module,
    captured: ModuleCall,
    choices: tuple[Choice, ...],
    fill: Callable[[], FilledGraphs],
    written: frozenset[int],
) -> dict[str, Callable[[], Call]]:
    """Builders of what may run instead of the module's own forward: the choices graph by graph, and
    torch.compile where that is not known to be slower.
    """
    training = len(choices) > 1
    random = any(is_random_program(choice.region.program) for choice in choices)
    # Double backward runs the forward a second time. That repeats the first run only if it draws no
    # random numbers and writes to nothing but running statistics: a forward that also reads another
    # buffer that it writes had other gradients under create_graph.
    repeatable = not random and {id(captured.inputs[number]) for number in written} <= set(
        map(id, list_running_statistics(module))
    )
    # Inductor's C++ code throws inside a parallel loop where an index is out of range, and the
    # process ends. Eager raises IndexError.
    on_cpu = choices[0].region.program.device == "cpu"

    def compile_module() -> Call:
        # Inductor draws its own random numbers by default, so one seed would give other results
        # than eager's. With `fallback_random` it draws from eager's generator.
        patches: dict[str, Any] = {"fallback_random": True} if random else {}
        if on_cpu:
            patches |= cpu_index_checks()
        compiled = raise_as_eager(
            # `_call_impl`, not the module: the slot that the dispatcher takes would be compiled
            # into itself.
            torch.compile(module._call_impl, backend=_make_repeatable_inductor(patches)),
            module._call_impl,
        )
        return with_double_backward(lambda args, kwargs: compiled(*args, **kwargs))

    def build_graphs() -> Call:
        filled = fill()
        return ServedCall(
            with_double_backward(
                preserve_versions(captured.wrap_compiled(filled.call, written), module)
            ),
            captured.guard,
            module,
            filled,
        )

    def with_double_backward(call: Call) -> Call:
        return (
            allow_double_backward(call, module, captured.guard) if training and repeatable else call
        )

    # In training torch.compile was in no benchmark of regions. In inference it was, unless the
    # evidence says that it may be faster here.
    builders = (
        {TORCH_COMPILE: compile_module} if training or _may_lose_to_inductor(choices[0]) else {}
    )
    # Eager graph by graph is the module's own forward with more overhead, so it is no contender.
    if any(choice.swapped for choice in choices) or not (
        training or choices[0].candidate.schedule == "eager"
    ):
        builders["cudal1"] = build_graphs
    return builders


def _make_repeatable_inductor(options: dict[str, Any]) -> Callable[..., Any]:
    """torch.compile's default backend, for steps whose backward may be repeated."""

    # AOTAutograd lets a compiled backward write over tensors that the forward saved, and raises
    # when it runs a second time. Eager does not, once the graph was retained.
    def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx_graph(gm, inputs, options, repeatable_backward=True)

    return compile_graph


# By what factor a CUDA graph must have won for its benchmark in another process to be taken for
# certain: busy machines were off by 1.25.
_CERTAIN_GAIN = 1.5


@dataclass(frozen=True, eq=False)
class FilledGraphs:
    """A trace with a callable in each of its graphs: `call` is the whole, `direct` the same without
    AOTAutograd's wrapper where nothing needs it. `fill` puts these callables, `swapped`, into the trace
    again.
    """

    call: Callable[..., Any]
    direct: DirectCall | None
    fill: Callable[[], None]
    swapped: Sequence[Swapped | GraphedLater]


@dataclass(frozen=True, eq=False)
class ServedCall:
    """A call graph by graph, and the direct call where there is one; `guard` says how long that is
    valid. `filled.fill` puts its graphs into the trace, where another contender's may stand.
    """

    call: Call
    guard: ModuleGuard
    module: torch.nn.Module
    filled: FilledGraphs

    @property
    def direct(self) -> DirectCall | None:
        """The call without AOTAutograd's wrapper, where nothing needs it."""
        return self.filled.direct

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.call(args, kwargs)

    def with_refill(self) -> ServedCall:
        """The same call for a measurement beside others of the same trace: each call puts its graphs
        in first.
        """

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.filled.fill()
            return self.call(args, kwargs)

        return replace(self, call=call)

    def put_dispatch_table_first(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], context: TuneContext
    ) -> Call:
        """The callable that calls like this one will take: the dispatch table first."""
        # Served calls take the table, so a measurement without it would count overhead that they do
        # not have.
        table = make_dispatch_table(cuda=context.device.type == "cuda")
        if table is None or self.direct is None:
            return self.call
        self.direct.add_to_table(table, self, self.guard, self.module, args, kwargs)
        return try_table_first(table, self.call)


def fill_graphs(
    traced: TracedModule | RecalledGraph,
    regions: Sequence[LoweredRegion],
    choices: Sequence[Choice],
    context: TuneContext,
    captured: ModuleCall,
    compiled: Sequence[Swapped] = (),
) -> FilledGraphs:
    """Build every choice into its graph of the trace. `compiled`: the same choices without a CUDA
    graph, where they were built before.
    """
    built = _build_graphs(traced, choices, context, compiled)

    def fill() -> None:
        for item, swapped in zip(regions, built, strict=True):
            # A region's inputs are in canonical order, the graph's in the order of AOTAutograd.
            traced.fill(item.region.kind, reorder_inputs(swapped, item.order))

    fill()
    direct = _make_direct_call(traced, regions, built, captured)
    return FilledGraphs(traced.call, direct, fill, built)


def fill_in_place(
    captured: ModuleCall,
    choice: Choice,
    context: TuneContext,
    written: frozenset[int],
    compiled: Callable[..., Any] | None,
) -> FilledGraphs:
    """Inductor's callable for Dynamo's graph itself, which writes to the placeholders `written` where
    they lie: a region's Program would write to copies and copy them back, which for a cache of keys
    and values costs more than the step. `compiled`: the same without a CUDA graph, where it was
    built before.
    """
    call = compiled or _compile_dynamo_graph(captured, choice)
    if not choice.candidate.schedule.cuda_graph:
        return FilledGraphs(call, None, lambda: None, ())
    static = find_lifted_parameters(captured.graph) | {
        position
        for position, source in enumerate(captured.sources or ())
        if isinstance(source, torch.Tensor)
    }
    graphed = GraphedLater(call, static, context.device, context.settings.strictness, written)
    return FilledGraphs(graphed, None, lambda: None, (graphed,))


def _compile_dynamo_graph(captured: ModuleCall, choice: Choice) -> Callable[..., Any]:
    options = {"fallback_random": True} if is_random_program(choice.region.program) else {}
    # A graph of its own: Inductor may change the one that it compiles.
    graph = torch.fx.GraphModule(captured.graph, captured.graph.graph)
    # With a ShapeEnv, although every size is known: without it Inductor bypasses its caches.
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    inputs = [fake.from_tensor(tensor, static_shapes=True) for tensor in captured.inputs]
    with tracing(None), unset_fake_temporarily(), torch.no_grad():
        return compile_with_inductor(graph, inputs, options, repeatable_backward=False)


def _build_graphs(
    traced: TracedModule | RecalledGraph,
    choices: Sequence[Choice],
    context: TuneContext,
    compiled: Sequence[Swapped],
) -> list[Swapped]:
    """The callable of every choice. Raises what its schedule raises."""
    # Any graph of the trace that writes makes a second run of the others see other inputs.
    built, writes = [], any(graph.writes for graph in traced.graphs)
    options: dict[str, Any] = {
        "strictness": context.settings.strictness,
        "options": choose_inductor_options(context),
    }
    # Inductor finds files that another machine compiled, so a machine without a compiler can start.
    with provide_artifacts([choice.region.key for choice in choices], context):
        for position, choice in enumerate(choices):
            wrapper = wrap_with_checks(choice, context, writes=writes)
            front = None if isinstance(wrapper, Refusal) else wrapper
            runner = compiled[position].runner if compiled else None
            built.append(
                swap(
                    choice.region,
                    choice.candidate,
                    context.device,
                    around=front,
                    compiled=runner,
                    **options,
                )
            )
    return built


def _make_direct_call(
    traced: TracedModule | RecalledGraph,
    regions: Sequence[LoweredRegion],
    built: Sequence[Swapped],
    captured: ModuleCall,
) -> DirectCall | None:
    """The direct call of the one graph, if nothing of AOTAutograd's wrapper or of Dynamo's bytecode
    is needed around it.
    """
    # AOTAutograd's wrapper rebuilds aliased outputs, writes mutated inputs back and saves for the
    # backward. Dynamo's bytecode replays side effects. A direct call skips both, so it is made only
    # where neither has anything to do. Dynamo alone costs 10 to 12 us a call.
    if (
        not traced.direct
        or captured.sources is None
        or captured.outputs is None
        or captured.outputs.uses_arguments
    ):
        return None
    (item,), (graph,), (swapped,) = regions, traced.graphs, built
    origins = [graph.origins[position] for position in item.order]
    sources = tuple(captured.sources[origin] for origin in origins if isinstance(origin, int))
    # `traced.direct` is true only where every origin is a placeholder.
    assert len(sources) == len(origins)
    return DirectCall(
        lambda: swapped.direct, sources, captured.make_output_builder(), captured.conditions
    )


def find_written_placeholders(traced: TracedModule | RecalledGraph) -> frozenset[int]:
    """The placeholders of Dynamo's graph that a call writes to."""
    return frozenset(
        origin for graph in traced.graphs for origin in graph.writes if isinstance(origin, int)
    )


def _may_lose_to_inductor(choice: Choice) -> bool:
    """Whether torch.compile itself must be measured beside what was chosen for an inference graph.

    A CUDA graph of a baseline won by medians, in another process, and not by far; and where Inductor
    failed in that process, it was in no benchmark.
    """
    evidence = choice.entry.evidence if choice.entry is not None else {}
    # Inductor may have failed for lack of something in the judge's process that this process has,
    # such as a compiler. Results that differ from eager's would differ here too.
    failed = evidence.get("baseline_failures", {}).get("inductor", "")
    if failed:
        return bool(failed != DIFFERS_FROM_EAGER)
    baselines_us: Mapping[str, float] = evidence.get("baselines_us", {})
    schedule = choice.candidate.schedule
    if choice.swapped or not schedule.cuda_graph or "inductor" not in baselines_us:
        return False
    # Compiling a second time, as torch.compile does it, takes as long as the first: half a minute
    # for a Swin-T.
    won_by = baselines_us["inductor"] / baselines_us.get(schedule, math.inf)
    return won_by < _CERTAIN_GAIN
