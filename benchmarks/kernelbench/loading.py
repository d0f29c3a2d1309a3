"""A task's text as a module with inputs on a device, and how much memory it will take. Only in a
task's own process.

It runs the task's source, which the user of the benchmark chose; candidates of others are never
loaded here (the judge's processes do that). Tensors are made on the device itself: inputs of
several GB would take longer on the CPU than the task.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torch_cudal1.core.kernelbench_format import NAMES, constructor_arguments

__all__ = [
    "Demand",
    "TaskSource",
    "estimate_demand",
    "import_source",
    "make_fake_module",
    "make_inputs",
    "make_module",
    "tensor_bytes",
]

_SEED = 42
_LIVE_INTERMEDIATES = 4  # intermediates of the largest size that are alive at once


@dataclass(frozen=True)
class TaskSource:
    """The module that a task defines. `dtype`: of its floating-point weights and inputs, where that is
    not the task's own.
    """

    source: ModuleType
    dtype: torch.dtype | None = None

    def module(self) -> nn.Module:
        """A new Model, constructed as its file does."""
        args, kwargs = constructor_arguments(self.source.get_init_inputs())
        module: nn.Module = self.source.Model(*args, **kwargs)
        return module if self.dtype is None else module.to(self.dtype)

    def inputs(self) -> list[Any]:
        """A set of inputs, drawn by the task's own get_inputs."""
        return list(pytree.tree_map(self._convert, list(self.source.get_inputs())))

    def _convert(self, value: Any) -> Any:
        if self.dtype is None or not isinstance(value, torch.Tensor):
            return value
        return value.to(self.dtype) if value.is_floating_point() else value


def import_source(path: Path, dtype: torch.dtype | None = None) -> TaskSource:
    """Run a task's file. Raises what it raises, and ValueError for one without Model, get_inputs,
    get_init_inputs.
    """
    spec = importlib.util.spec_from_file_location(f"kernelbench_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path.name} is no Python file")
    source = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = source
    spec.loader.exec_module(source)
    if absent := [name for name in NAMES if not hasattr(source, name)]:
        raise ValueError(f"the task defines no {', no '.join(absent)}; expected {', '.join(NAMES)}")
    return TaskSource(source, dtype)


def make_module(source: TaskSource, device: torch.device, mode: str) -> nn.Module:
    """The Model with the same weights at every call, on the device, in mode "eval" or "train"."""
    with _fix_seed(_SEED), torch.device(device):
        module = source.module()
    return module.to(device).train(mode == "train")


def make_inputs(source: TaskSource, device: torch.device, seed: int) -> tuple[Any, ...]:
    """A set of inputs, drawn by the task's own get_inputs, on the device."""
    with _fix_seed(_SEED + seed), torch.device(device):
        inputs = source.inputs()
    return tuple(
        pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, inputs)
    )


@dataclass(frozen=True)
class Demand:
    """What one eager call needs, estimated without making any tensor.

    `memory_bytes`: at most at once. `least_bytes`: inputs, parameters and results once, what any
    kernel moves. `flops`: of its products and convolutions as the task writes them; a rewrite may
    need fewer. `given_bytes`: of inputs and parameters.
    """

    memory_bytes: int
    least_bytes: int
    flops: int
    given_bytes: int = 0

    @property
    def result_bytes(self) -> int:
        """Bytes of its results."""
        return self.least_bytes - self.given_bytes


def make_fake_module(source: TaskSource) -> nn.Module:
    """The task's module without memory for its weights, in FakeTensorMode; with it where its
    constructor asks tensors for values (a Swin transformer its rates of stochastic depth).
    """
    plain = TaskSource(source.source)
    try:
        module = plain.module()
    except DataDependentOutputException:
        with unset_fake_temporarily():
            return source.module()
    return module if source.dtype is None else _convert_fake(module, source.dtype)


def estimate_demand(source: TaskSource, mode: str) -> Demand | None:
    """The task's demand; None where fake tensors cannot run it.

    On a pretended CPU wherever it runs later: sizes are the same, and nothing of cuDNN's asks for
    real memory.
    """
    counter = FlopCounterMode(display=False)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Outputs() as outputs, torch.no_grad():
            module, inputs = (
                make_fake_module(source).train(mode == "train"),
                source.inputs(),
            )
            fixed_bytes: int = tensor_bytes([*inputs, *module.parameters(), *module.buffers()])
            outputs.sizes.clear()
            with counter:
                result = module(*inputs)
    except Exception:  # noqa: BLE001
        # a task that fake tensors cannot run has no estimate, whatever it raised
        return None
    largest: list[int] = sorted(outputs.sizes, reverse=True)[:_LIVE_INTERMEDIATES]
    return Demand(
        fixed_bytes + sum(largest),
        fixed_bytes + tensor_bytes(result),
        counter.get_total_flops(),
        fixed_bytes,
    )


def tensor_bytes(tree: Any) -> int:
    """Bytes of all tensors in a nest of values."""
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
    )


class _Outputs(TorchDispatchMode):
    """Records the sizes of what operators return, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.sizes.append(tensor_bytes(result))
        return result


def _convert_fake(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`module.to(dtype)` where its tensors are fake, which PyTorch cannot put in each other's place."""
    converted: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                # One tensor under two names stays one.
                if id(tensor) not in converted:
                    other = tensor.detach().to(dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    converted[id(tensor)] = nn.Parameter(other) if is_parameter else other
                tensors[name] = converted[id(tensor)]  # type: ignore[assignment]
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()
    return module


@contextmanager
def _fix_seed(seed: int) -> Iterator[None]:
    """Random numbers of the body come from `seed`; generators continue from there, which no other
    code of the process depends on.
    """
    torch.manual_seed(seed)
    yield
