"""Recurrent layers as one step each: `aten.lstm.input`, `aten.gru.input`, `aten.rnn_tanh.input`,
`aten.rnn_relu.input`.

PyTorch decomposes these operators wherever it traces: into a loop over time steps, or into cuDNN's
call, which asks fake weights for their addresses and fails. `OneStepRecurrence` puts `cudal1::lstm`
and the like in their place while a module is traced. All Python code that handles a step
(`aten.overload`) uses these stand-ins too, because they know their result's shape. A Program names
the ATen operator only and runs it as eager does: where the weights are contiguous in one buffer,
cuDNN reads them there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = [
    "TARGETS",
    "OneStepRecurrence",
    "find_one_step_layers",
    "operator_of",
    "rewrite_as_one_step",
    "target_of",
]

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
TARGETS = frozenset(f"aten.{name}.input" for name in _NAMES)
_CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)


def operator_of(target: str) -> torch._ops.OpOverload:
    """The operator that stands for `target`, one of `TARGETS`: same schema, same result, and a
    result on fake tensors.
    """
    _define()
    operator: torch._ops.OpOverload = getattr(torch.ops.cudal1, target.split(".")[1]).default
    return operator


def target_of(name: str) -> str:
    """`name` ("cudal1.lstm.default", "aten.add.Tensor") as a Program has it."""
    namespace, operator, _ = name.split(".")
    return f"aten.{operator}.input" if namespace == "cudal1" and operator in _NAMES else name


class OneStepRecurrence(TorchFunctionMode):
    """While it is entered, recurrent layers are traced as one step each, where that is what eager
    runs.

    Left to PyTorch: layers that need a gradient, packed sequences, dropout between layers,
    autocast, and on CUDA what cuDNN does not serve.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = _recurrent_functions().get(func)
        if target is not None and not kwargs and _is_served(args):
            return operator_of(target)(*args)
        return func(*args, **(kwargs or {}))


def find_one_step_layers(graph: torch.fx.Graph) -> list[bool]:
    """For each recurrent layer that a Dynamo graph calls: whether `OneStepRecurrence` traces it as
    one step.
    """
    return [_is_one_step(node) for node in _layers(graph)]


def rewrite_as_one_step(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A Dynamo graph as `OneStepRecurrence` would trace it; `module` itself where that changes nothing.

    Meant for a compiler with caches of its own.
    """
    # Such a cache tells graphs apart by the functions that they call, and does not know the mode
    # around them: the same key would stand for both forms.
    steps = find_one_step_layers(module.graph)
    if not any(steps):
        return module
    copied_module = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    copied_module.meta.update(module.meta)
    for node, is_served in zip(_layers(copied_module.graph), steps, strict=True):
        if is_served:
            node.target = operator_of(_recurrent_functions()[node.target])
    copied_module.recompile()
    return copied_module


def _layers(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target in _recurrent_functions()
    ]


def _is_one_step(node: torch.fx.Node) -> bool:
    # Without an example value neither dtype nor device of a tensor is known.
    if node.kwargs or any("example_value" not in source.meta for source in node.all_input_nodes):
        return False
    return _is_served(torch.fx.node.map_arg(node.args, lambda source: source.meta["example_value"]))


@cache
def _recurrent_functions() -> dict[Any, str]:
    return {getattr(torch, name): f"aten.{name}.input" for name in _NAMES}


def _is_served(args: Sequence[Any]) -> bool:
    """Whether these are the arguments of a dense sequence, for which a step is what eager does."""
    # A packed sequence has (data, batch_sizes, hx, ...) instead.
    if len(args) != 9 or not isinstance(args[2], (tuple, list)):
        return False
    sequence, dropout, training = args[0], args[5], args[6]
    if (
        sequence.ndim != 3
        or sequence.numel() == 0
        # Dropout between layers draws numbers inside the operator.
        or (training and dropout)
        or torch.is_autocast_enabled(sequence.device.type)
    ):
        return False
    # The stand-in has no autograd formula.
    if torch.is_grad_enabled() and any(t.requires_grad for t in (sequence, *args[2])):
        return False
    if sequence.device.type == "cuda":
        return bool(
            torch.backends.cudnn.enabled
            and torch.backends.cudnn.is_available()
            and sequence.dtype in _CUDNN_DTYPES
        )
    return bool(sequence.device.type == "cpu")


@cache
def _define() -> torch.library.Library:
    library = torch.library.Library("cudal1", "FRAGMENT")
    for name in _NAMES:
        operator = getattr(torch.ops.aten, name).input
        signature = str(operator._schema).partition("(")
        library.define(
            f"{name}({signature[2]}",
            # As ATen's operators are tagged; `aten.is_random` looks at the arguments.
            tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
        )
        for key in ("CPU", "CUDA"):
            library.impl(name, partial(_run, operator), key)
        torch.library.register_fake(
            f"cudal1::{name}", _fake_lstm if name == "lstm" else _fake_plain, lib=library
        )
    return library


def _run(operator: Callable[..., tuple[torch.Tensor, ...]], *args: Any) -> tuple[torch.Tensor, ...]:
    return operator(*args)


def _fake_lstm(
    input: torch.Tensor, hx: Sequence[torch.Tensor], params: Sequence[torch.Tensor], *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output, hidden = _fake_plain(input, hx[0], params, *rest)
    return output, hidden, hx[1].new_empty(hx[1].shape)


def _fake_plain(
    input: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, bidirectional, batch_first = rest
    outer = input.transpose(0, 1) if batch_first else input
    # From hx, not from the weights: with proj_size an LSTM yields fewer features than its hidden
    # size.
    shape = (*outer.shape[:2], hx.shape[-1] * (2 if bidirectional else 1))
    # Time is outermost in memory whether `batch_first` or not.
    output = input.new_empty(shape)
    return output.transpose(0, 1) if batch_first else output, hx.new_empty(hx.shape)
