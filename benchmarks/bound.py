"""Modules bound to a given Program or runner, as `accelerate` leaves them after a search, without a
search.

A call takes the same path as an accelerated module's: `nn.Module.__call__`, the dispatcher, the C++
entry, the runner. It serves to measure the cost of that path and says nothing about what a search
would choose.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from torch_cudal1.api.binding import collect_weight_identities
from torch_cudal1.api.bound import Bound
from torch_cudal1.api.dispatcher import Dispatcher
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.module_call import ModuleCall, capture_module_call
from torch_cudal1.ir.interpreter import Runner, interpret
from torch_cudal1.ir.program import Alloc, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.runtime import guard
from torch_cudal1.runtime.dispatch import DirectCall
from torch_cudal1.runtime.executor import launch_through_driver
from torch_cudal1.runtime.runner import build_runner

__all__ = ["bind_module", "bind_to", "compile_relu", "make_chain"]


def bind_to(
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
    runner: Runner,
    sources: tuple[int | torch.Tensor, ...],
    captured: ModuleCall | None = None,
) -> nn.Module:
    """Let `runner`, fed from `sources`, serve `module(*args)` in the present modes, under the
    guards of `captured` (None: it is captured here); it returns one tensor.
    """
    dispatcher = Dispatcher(module, Settings())
    dispatcher._update_device_types(args, {})
    captured = captured or capture_module_call(module, args, {})
    module_guard = captured.guard

    def slow(call_args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return runner(
            [call_args[source] if isinstance(source, int) else source for source in sources]
        )[0]

    # as `Swapped.direct`
    direct = DirectCall(
        lambda: getattr(runner, "direct", runner), sources, None, captured.conditions
    )
    bound = Bound(
        slow,
        module_guard,
        (),
        "bound by a benchmark",
        collect_weight_identities(module),
        direct,
        captured.conditions,
    )
    dispatcher.bindings[dispatcher._make_key(guard.signature(args, {}))] = bound
    module._compiled_call_impl = dispatcher
    return module


def bind_module(module: nn.Module, args: tuple[torch.Tensor, ...], schedule: str) -> nn.Module:
    """`module` bound to its own operators under a schedule ("eager", "eager+graph", or "python":
    the executor in plain Python).
    """
    device = args[0].device
    (region,) = capture_regions(module, args)
    static = [position for position, role in enumerate(region.roles) if role != "input"]
    if schedule == "python":
        runner = interpret(region.program, device, launcher=launch_through_driver)
    else:
        runner = build_runner(region.program, schedule, device, static=static)
    call, sources = _capture_call(module, args)
    return bind_to(module, args, runner, sources, call)


def _capture_call(
    module: nn.Module, args: tuple[torch.Tensor, ...]
) -> tuple[ModuleCall, tuple[int | torch.Tensor, ...]]:
    """The call, and where each input of the module's region comes from."""
    from torch_cudal1.graph.captured import capture_call_graphs, lower_captured

    call, traced = capture_call_graphs(module, args, {})
    (graph,) = traced.graphs
    origins = [graph.origins[position] for position in lower_captured(graph, module).order]
    assert call.sources is not None
    return call, tuple(call.sources[origin] for origin in origins if isinstance(origin, int))


@functools.cache
def compile_relu(
    device: torch.device, block: int = 1024
) -> tuple[torch.Tensor, dict[str, Any], Any]:
    """The machine code of a relu for this GPU, the facts to launch it, and the Triton function."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.kernels import relu

    major, minor = torch.cuda.get_device_capability(device)
    source = ASTSource(
        relu, {"x": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": block}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32))
    facts = {
        "symbol": compiled.metadata.name,
        "block": 32 * compiled.metadata.num_warps,
        "shared_bytes": compiled.metadata.shared,
    }
    return torch.frombuffer(bytearray(compiled.asm["cubin"]), dtype=torch.uint8), facts, relu


def make_chain(x: torch.Tensor, launches: int, block: int = 1024) -> Program:
    """A Program that applies relu `launches` times, each launch into a new allocation."""
    cubin, facts, _ = compile_relu(x.device, block)
    spec = TensorSpec.of(x)
    steps: list[Any] = []
    for index in range(launches):
        pointers = tuple(LaunchArg("ptr", Value(number)) for number in (index, index + 1))
        args = (*pointers, LaunchArg("i32", x.numel()), LaunchArg("null"), LaunchArg("null"))
        steps += [
            Alloc(index + 1, spec),
            Launch("relu", grid=(-(-x.numel() // block), 1, 1), args=args, **facts),
        ]
    return Program((spec,), tuple(steps), (launches,), payloads={"relu": cubin})
