"""What PyTorch itself offers, each in its best form: these are the denominators.

`torch.compile` is called once more than needed before it is timed. A CUDA graph copies its inputs
in and returns its own output, as CUDA-L1's graph baseline and reduce-overhead do, so it pays for no
copy of the result. No baseline gets information about the task. A baseline's answer is compared
with eager's with a wide tolerance: one that computes something else is no denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.kernelbench.job import AUTOTUNE, COMPILE, EAGER, GRAPH, REDUCE

__all__ = ["STARTS", "Call", "copy_tensors", "find_gross_error", "list_state_tensors"]

Call: TypeAlias = Callable[..., Any]
Start: TypeAlias = Callable[[nn.Module, tuple[Any, ...]], Call]

_WARM_CALLS = 3  # of a graph before it is captured
# rms difference from eager over eager's rms, above which a baseline computes something else
MAX_RELATIVE_DIFFERENCE = 1e-2
# Every layer of bfloat16 rounds by up to 0.4 %, elsewhere where Inductor fuses.
_HALF_LEEWAY = 5


def _start_eager(module: nn.Module, _: tuple[Any, ...]) -> Call:
    return module


def _compile(module: nn.Module, _: tuple[Any, ...]) -> Call:
    return torch.compile(module)


def _compile_reduce_overhead(module: nn.Module, _: tuple[Any, ...]) -> Call:
    return torch.compile(module, mode="reduce-overhead")


def _compile_autotuned(module: nn.Module, _: tuple[Any, ...]) -> Call:
    return torch.compile(module, mode="max-autotune")


def _capture_graph(module: nn.Module, inputs: tuple[Any, ...]) -> Call:
    """Eager's kernels captured once and replayed. Raises RuntimeError for what cannot be captured.

    A module that puts new tensors into itself cannot: its graph would go on to read memory that is
    freed.
    """
    static, tree = pytree.tree_flatten(inputs)
    static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in static]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before = list_state_tensors(module)
        for _ in range(_WARM_CALLS):
            module(*pytree.tree_unflatten(static, tree))
    torch.cuda.current_stream().wait_stream(stream)
    if changed := sorted(
        name
        for name, tensor in list_state_tensors(module).items()
        if before.get(name) is not tensor
    ):
        raise RuntimeError(
            f"the module assigns {', '.join(changed)} in its forward: a captured graph would read what is freed"
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = module(*pytree.tree_unflatten(static, tree))
    static_tensors = [leaf for leaf in static if isinstance(leaf, Tensor)]

    def call(*args: Any) -> Any:
        for static_tensor, argument in zip(
            static_tensors,
            (leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)),
            strict=True,
        ):
            static_tensor.copy_(argument)
        graph.replay()
        return result

    return call


STARTS: Mapping[str, Start] = MappingProxyType(
    {
        EAGER: _start_eager,
        COMPILE: _compile,
        REDUCE: _compile_reduce_overhead,
        GRAPH: _capture_graph,
        AUTOTUNE: _compile_autotuned,
    }
)


def list_state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Buffers, and tensors in plain attributes, by name."""
    attributes = {
        f"{module_path}.{name}".lstrip("."): item
        for module_path, submodule in module.named_modules()
        for name, item in vars(submodule).items()
    }
    return dict(module.named_buffers()) | {
        name: item for name, item in attributes.items() if isinstance(item, Tensor)
    }


def copy_tensors(result: Any) -> dict[str, Tensor]:
    """Copies of every tensor of a result, by its position: a graph's next replay would change them."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return {f"output {place}": leaf.detach().clone() for place, leaf in enumerate(leaves)}


def find_gross_error(outputs: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> str:
    """Why these are not eager's results within 1 %; "" if they are."""
    if list(outputs) != list(eager):
        return f"{list(outputs)}; eager has {list(eager)}"
    for name, tensor in outputs.items():
        expected = eager[name]
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}; eager's is {expected.dtype} {tuple(expected.shape)}"
        if not expected.is_floating_point():
            continue  # an index may differ where values tie
        finite = expected.isfinite()
        difference, scale = (
            _rms(torch.where(finite, tensor - expected, 0)),
            _rms(torch.where(finite, expected, 0)),
        )
        is_half = expected.dtype in (torch.bfloat16, torch.float16)
        if not difference <= MAX_RELATIVE_DIFFERENCE * (_HALF_LEEWAY if is_half else 1) * scale:
            return f"{name} differs from eager's by {difference:.3g}, which is {difference / scale if scale else float('inf'):.2g} of it"
    return ""


def _rms(tensor: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float32))
    return norm / math.sqrt(max(1, tensor.numel()))
