"""Makes a Program callable under a schedule: step by step or through Inductor, either with a CUDA
graph around it.

Inductor gets the whole Program as one graph, or each block of it, with each nested Program as one
opaque node. Nothing here measures or decides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.gc_pause import pause_gc
from torch_cudal1.core.inductor_start import await_keys
from torch_cudal1.core.path_shims import file_program_shim
from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.check import check_program, is_random_program
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, Program, TensorSpec, Value
from torch_cudal1.ir.schedule import INDUCTOR, Schedule
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.runtime.cuda_graph import GraphedRunner
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.runtime.huge_pages import use_huge_pages
from torch_cudal1.runtime.index_checks import cpu_index_checks
from torch_cudal1.runtime.operator import register, run_operator
from torch_cudal1.runtime.random_graph import RandomGraph, refuse_host_numbers
from torch_cudal1.runtime.regional import compile_by_blocks
from torch_cudal1.runtime.split_last_kernel import SplitRunner, split_last_step

__all__ = ["build_runner", "to_fx"]

# As mode="max-autotune-no-cudagraphs" of torch.compile: `cuda_graph` adds the graph itself.
_AUTOTUNE = {
    "max_autotune": True,
    "coordinate_descent_tuning": True,
}
# Options of Inductor under which a matrix product is no library's.
_TUNES_PRODUCTS = ("max_autotune", "max_autotune_gemm")
# Inductor's cache keys hold $CXX, which compiles nothing where every tensor is on a GPU. A fixed
# value lets a process find what another compiled under other variables (benchmarks/LOG.md).
_NO_CXX = {"cpp.cxx": (None, "g++")}


def build_runner(
    program: Program,
    schedule: Schedule | str,
    device: torch.device,
    *,
    static: Iterable[int] = (),
    options: Mapping[str, Any] | None = None,
    compiled: Runner | None = None,
) -> Runner:
    """A callable from the Program's inputs to its outputs.

    `static`: positions of parameters and buffers (for CUDA graphs). `options`: the user's own
    Inductor options. `compiled`: what this made of the same Program without a CUDA graph, which a
    graph around it then replays.

    Raises ProgramError for a Program that breaks a rule, NotLowerableError for a schedule that
    cannot serve it, and whatever Inductor raises when it cannot compile.
    """
    check_program(program)
    schedule = Schedule.parse(schedule)
    if schedule.cuda_graph:
        _refuse_graph(program, schedule, device)
    if compiled is not None:
        runner = compiled
    elif schedule.compiles:
        runner = _compile_in_parts(program, schedule, device, options or {})
    elif (
        schedule.cuda_graph
        and not is_random_program(program)
        and (parts := split_last_step(program)) is not None
    ):
        runner = SplitRunner(prepare(parts.first, device), prepare(parts.last, device))
    else:
        runner = prepare(program, device)
    if not schedule.cuda_graph:
        return runner
    if is_random_program(program):
        return RandomGraph(runner, frozenset(static), device)
    if isinstance(runner, SplitRunner):
        return GraphedRunner(runner.first, frozenset(static), device, last=runner.last)
    return GraphedRunner(runner, frozenset(static), device)


def _refuse_graph(program: Program, schedule: Schedule, device: torch.device) -> None:
    """Raises NotLowerableError where a CUDA graph would not compute what the Program does."""
    if device.type != "cuda":
        raise NotLowerableError(
            f"schedule {str(schedule)!r} needs a CUDA device, this is {device.type}"
        )
    if is_random_program(program):
        refuse_host_numbers(program)
    if any(spec.device != device.type for spec in program.inputs):
        raise NotLowerableError(
            "an input is on the CPU, and a CUDA graph would keep the value that it had at capture"
        )


def _compile_in_parts(
    program: Program, schedule: Schedule, device: torch.device, options: Mapping[str, Any]
) -> Runner:
    """The Program through Inductor, with a last step of its own where a graph around it would have
    large results to copy.
    """
    # Autotuning chooses among kernels of its own for a product.
    is_tuned = schedule.base == "max-autotune" or any(options.get(name) for name in _TUNES_PRODUCTS)
    # The same with and without a graph, since a graph is made around what was compiled without.
    can_be_split = device.type == "cuda" and not is_random_program(program) and not is_tuned
    parts = split_last_step(program, is_fused=True) if can_be_split else None
    if parts is None:
        return _compile(program, schedule, device, options)
    first = _compile(parts.first, schedule, device, options)
    if not parts.may_be_padded:
        return SplitRunner(first, prepare(parts.last, device))
    # One step has no blocks to compile one by one.
    return SplitRunner(first, _compile(parts.last, INDUCTOR, device, options))


def _compile(
    program: Program, schedule: Schedule, device: torch.device, options: Mapping[str, Any]
) -> Runner:
    """The Program through Inductor; `options` of the user outweigh those of the schedule."""
    defaults = (_NO_CXX if _is_all_on_cuda(program) else {}) | (
        _AUTOTUNE if schedule.base == "max-autotune" else {}
    )
    checks = cpu_index_checks() if device.type == "cpu" and _has_indices(program) else {}
    # In this order: the user's own options outweigh all others.
    options = defaults | checks | dict(options)
    if schedule.base == "regional":
        runner = compile_by_blocks(
            program, device, lambda segment: _call_inductor(segment, device, options)
        )
    else:
        runner = _call_inductor(program, device, options)
    # Half the time of diag(a) @ B at N = 4096 was page faults of its fresh 64 MB
    # (benchmarks/LOG.md, 2026-11-22).
    return use_huge_pages(runner) if device.type == "cpu" else runner


def to_fx(program: Program) -> fx.GraphModule:
    """The Program as an FX graph of ATen calls; every nested Program becomes one `cudal1::run`
    node.
    """
    if any(isinstance(step, (Alloc, Launch)) for step in program.steps):
        # An FX graph has no node for a launch or an allocation; a nested Program is one opaque
        # operator.
        program = _wrap_in_call(program)
    root = torch.nn.Module()
    graph = fx.Graph()
    values: list[Any] = [graph.placeholder(f"i{index}") for index in range(len(program.inputs))]
    for position, name in enumerate(program.constants):
        root.register_buffer(f"c{position}", program.payloads[name], persistent=False)
        # As buffers, so that Inductor sees tensors of the module and not inputs of every call.
        values.append(graph.get_attr(f"c{position}"))
    for step in program.steps:
        values += _emit(graph, step, values)
    graph.output(tuple(None if index is None else values[index] for index in program.outputs))
    return fx.GraphModule(root, graph)


def _emit(graph: fx.Graph, step: Any, values: Sequence[Any]) -> list[Any]:
    if isinstance(step, Aten):
        args = tuple(_convert_arg(arg, values) for arg in step.args)
        kwargs = {name: _convert_arg(arg, values) for name, arg in step.kwargs}
        node = graph.call_function(overload(step.target), args, kwargs)
        many, outs = step.many, step.outs
    else:
        node = graph.call_function(
            run_operator(), ([values[index] for index in step.args], register(step.program))
        )
        many, outs = True, step.outs
    if not many:
        return [node]
    return [
        graph.call_function(operator.getitem, (node, position)) for position in range(len(outs))
    ]


def _convert_arg(arg: Any, values: Sequence[Any]) -> Any:
    if isinstance(arg, Value):
        return values[arg.index]
    return [_convert_arg(item, values) for item in arg] if isinstance(arg, tuple) else arg


def _wrap_in_call(program: Program) -> Program:
    """The same computation as one nested call, for a Program that launches at its top level."""
    first = len(program.inputs)
    outs = tuple(range(first, first + len(program.outputs)))
    return Program(
        inputs=program.inputs, steps=(Call(program, tuple(range(first)), outs),), outputs=outs
    )


def _call_inductor(program: Program, device: torch.device, options: dict[str, Any]) -> Runner:
    with pause_gc(keeps=True):
        # Seconds to import, so only where something is compiled.
        from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor's own generator draws other numbers than eager: its fallback runs eager's operators.
    if is_random_program(program):
        options = options | {"fallback_random": True}
    module = to_fx(program).to(device)
    # A fresh context: this may run while Dynamo traces the user's model, and the fake mode of that
    # trace must not leak into this compilation.
    with tracing(None), unset_fake_temporarily(), torch.no_grad():
        # With a ShapeEnv, although every size is known: without it Inductor bypasses its caches,
        # and each process compiles again. The module's constants are real tensors.
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        with fake:
            inputs = [_fake_input(spec, device) for spec in program.inputs]
        # Triton's file names hold what the program `file` says: without it a filled cache is not
        # found.
        await_keys()
        with file_program_shim(device):
            compiled = cast(Callable[..., Any], compile_fx(module, inputs, config_patches=options))

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return list(compiled(*inputs))

    return run


def _has_indices(program: Program) -> bool:
    return any(spec.dtype.startswith(("int", "uint8")) for spec in value_specs(program).values())


def _is_all_on_cuda(program: Program) -> bool:
    """Whether every tensor that comes in or is made is on a GPU. Constants do not count: they are
    moved to the Program's device.
    """
    device_types = {
        arg.type
        for step in program.steps
        if isinstance(step, Aten)
        for _, arg in step.kwargs
        if isinstance(arg, torch.device)
    }
    return program.device == "cuda" and device_types | {spec.device for spec in program.inputs} <= {
        "cuda"
    }


def _fake_input(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    spec_device = device if spec.device == device.type else torch.device(spec.device)
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype, device=spec_device)
