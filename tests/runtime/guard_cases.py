"""Test helper: a model with state of every kind that a module guard watches, and changes of it.

`CHANGES` end a guard, and say with which words; `HARMLESS` uses leave it holding.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from torch_cudal1.core import native
from torch_cudal1.runtime.guard import (
    ModuleGuard,
    bind_guard,
)

BUILT, WHY_NOT = native.status()
NATIVE = pytest.param("native", marks=pytest.mark.skipif(not BUILT, reason=f"C++ guard: {WHY_NOT}"))
FLAG = 1.0
GAIN_TABLE = {"gain": 1.0}


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * FLAG


class BlockConfig:
    def __init__(self) -> None:
        self.gain = 1.0
        self.inner = {"sizes": [1, 2, 3]}


class StatefulBlock(nn.Module):
    slope = 0.1
    table: dict[str, float] = {"a": 1.0}  # noqa: RUF012  a mutable class attribute is the case under test

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.scale = 1.5
        self.sizes = [1, [2, 3]]
        self.options = {"mode": "a", "deep": {"x": 1}}
        self.marks = {"one", "two"}
        self.order = OrderedDict(a=1, b=2)
        self.raw = bytearray(b"abc")
        self.pair = ([1],)
        self.config = BlockConfig()
        self.cache = torch.ones(4)
        self.callback = make_callback()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x) * GAIN_TABLE["gain"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.step(self.linear(x))) * self.scale + self.mean


def make_callback() -> Callable[[], float]:
    factor = 2.0

    def callback() -> float:
        return factor

    return callback


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = StatefulBlock()
        self.layers = nn.Sequential(StatefulBlock(), nn.Tanh())
        self.tied = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.first(x))


def bind(module: nn.Module, implementation: Any = None) -> ModuleGuard:
    module_guard = bind_guard(module, implementation=implementation)
    assert isinstance(module_guard, ModuleGuard), module_guard
    assert module_guard.holds(), module_guard.explain_difference()
    assert module_guard.explain_difference() == ""
    return module_guard


def _set(path: str, value: Any) -> Callable[[Model], None]:
    owner, _, name = path.rpartition(".")
    return lambda m: setattr(m.get_submodule(owner), name, value)


def _swap_data(m: Model) -> None:
    m.first.linear.weight.data = m.first.linear.weight.data.half()


def _transpose(m: Model) -> None:
    m.first.linear.weight.data = m.first.linear.weight.data.t()


def _misalign(m: Model) -> None:
    m.first.mean.data = torch.zeros(5)[1:]


def _free(m: Model) -> None:
    m.first.linear.weight.untyped_storage().resize_(0)


def _rename(m: Model) -> None:
    m.layers._modules["one"] = m.layers._modules.pop("1")


def _reorder(m: Model) -> None:
    m.layers._modules["0"] = m.layers._modules.pop("0")


def _new_dict(m: Model) -> None:
    m.first.__dict__ = dict(m.first.__dict__)


def _same_size_swap(
    m: Model,
) -> None:  # one attribute goes, another comes, both None: the size does not tell
    del m.first.spare
    m.first.other = None


def _new_class(m: Model) -> None:
    m.first.__class__ = type("Other", (StatefulBlock,), {})


def _in_cell(m: Model) -> None:
    m.first.callback.__closure__[0].cell_contents = 3.0


def _delete(path: str) -> Callable[[Model], None]:
    owner, _, name = path.rpartition(".")
    return lambda m: delattr(m.get_submodule(owner), name)


def _first(do: Callable[[Any], Any]) -> Callable[[Model], Any]:
    return lambda m: do(m.first)


CHANGES: dict[str, tuple[Callable[[Model], Any], str]] = {
    "train to eval": (lambda m: m.eval(), "training changed"),
    "one layer to eval": (lambda m: m.layers[0].linear.eval(), "layers.0.linear: training changed"),
    "plain attribute": (_set("first.scale", 2.0), "first: scale changed"),
    "new attribute": (_set("layers.1.extra", 1), "layers.1: extra added"),
    "deleted attribute": (_delete("first.scale"), "first: scale removed"),
    "attribute renamed": (_same_size_swap, "first: spare removed"),
    "instance forward": (_set("layers.1.forward", lambda x: x), "layers.1: forward added"),
    "attribute dictionary": (_new_dict, "first: __dict__ was replaced"),
    "class of a child": (_new_class, "first: class StatefulBlock -> Other"),
    "hook dictionary": (
        _set("first._forward_hooks", OrderedDict()),
        "first: _forward_hooks changed",
    ),
    "parameter replaced": (
        lambda m: setattr(m.first.linear, "weight", nn.Parameter(torch.ones(4, 4))),
        "parameter first.linear.weight: replaced",
    ),
    "parameter removed": (
        lambda m: m.first.linear.register_parameter("bias", None),
        "parameter first.linear.bias: replaced",
    ),
    "parameter added": (
        lambda m: m.layers[1].register_parameter("p", nn.Parameter(torch.ones(1))),
        "parameter layers.1.p: added",
    ),
    "parameter deleted": (_delete("first.linear.bias"), "parameter first.linear.bias: removed"),
    "buffer replaced": (_set("first.mean", torch.ones(4)), "buffer first.mean: replaced"),
    "buffer added": (
        lambda m: m.layers[1].register_buffer("b", torch.ones(1)),
        "buffer layers.1.b: added",
    ),
    "child replaced": (
        lambda m: m.layers.__setitem__(1, nn.ReLU()),
        "submodule layers.1: replaced",
    ),
    "child appended": (lambda m: m.layers.append(nn.ReLU()), "submodule layers.2: added"),
    "child deleted": (lambda m: m.layers.__delitem__(1), "layers: _modules changed"),
    "child popped": (lambda m: m.layers._modules.pop("1"), "submodule layers.1: removed"),
    "linear to half": (
        lambda m: m.first.linear.half(),
        "parameter first.linear.weight: dtype float32 -> float16",
    ),
    "child renamed": (_rename, "submodule layers.1: removed"),
    "children reordered": (_reorder, "layers: order of submodules changed"),
    "child is identity": (_set("first.linear", nn.Identity()), "submodule first.linear: replaced"),
    "half": (lambda m: m.half(), "buffer first.mean: replaced"),
    "p.data = half": (_swap_data, "parameter first.linear.weight: dtype float32 -> float16"),
    "p.data = transposed": (_transpose, "parameter first.linear.weight: strides (4, 1) -> (1, 4)"),
    "b.data = unaligned": (_misalign, "buffer first.mean: address aligned -> unaligned"),
    "storage freed": (_free, "parameter first.linear.weight: address aligned -> none"),
    "meta device": (lambda m: m.to("meta"), "buffer first.mean: replaced"),
    "shape": (
        lambda m: setattr(m.first.mean, "data", torch.zeros(1, 4)),
        "buffer first.mean: shape (4,) -> (1, 4)",
    ),
    "attribute tensor": (
        lambda m: setattr(m.first.cache, "data", torch.zeros(2)),
        "tensor first.cache: shape (4,) -> (2,)",
    ),
    "frozen": (lambda m: m.first.requires_grad_(False), "requires_grad True -> False"),
    "forward hook": (
        _first(lambda b: b.register_forward_hook(print)),
        "first._forward_hooks: hooks were registered",
    ),
    "forward hook, kwargs": (
        _first(lambda b: b.register_forward_hook(print, with_kwargs=True)),
        "_forward_hooks: hooks",
    ),
    "forward hook, always": (
        _first(lambda b: b.register_forward_hook(print, always_call=True)),
        "_forward_hooks: hooks",
    ),
    "forward pre hook": (
        _first(lambda b: b.register_forward_pre_hook(print)),
        "first._forward_pre_hooks: hooks",
    ),
    "inner hook": (
        lambda m: m.layers[1].register_forward_hook(print),
        "layers.1._forward_hooks: hooks",
    ),
    "backward hook": (
        _first(lambda b: b.register_full_backward_hook(print)),
        "first._backward_hooks: hooks",
    ),
    "backward pre hook": (
        _first(lambda b: b.register_full_backward_pre_hook(print)),
        "first._backward_pre_hooks: hooks",
    ),
    "list item": (lambda m: m.first.sizes.__setitem__(0, 7), "first.sizes: content changed"),
    "nested list": (lambda m: m.first.sizes[1].append(4), "first.sizes[1]: content changed"),
    "list in a tuple": (lambda m: m.first.pair[0].clear(), "first.pair[0]: content changed"),
    "dict item": (lambda m: m.first.options.update(mode="b"), "first.options: item 'mode' changed"),
    "nested dict": (
        lambda m: m.first.options["deep"].update(y=1),
        "first.options['deep']: item 'y' added",
    ),
    "ordered dict": (
        lambda m: m.first.order.move_to_end("a"),
        "first.order: order of items changed",
    ),
    "set": (lambda m: m.first.marks.add("three"), "first.marks: content changed"),
    "bytearray": (lambda m: m.first.raw.__setitem__(0, 0), "first.raw: content changed"),
    "object attribute": (
        lambda m: setattr(m.first.config, "gain", 2.0),
        "first.config: gain changed",
    ),
    "list in an object": (
        lambda m: m.first.config.inner["sizes"].pop(),
        "first.config.inner['sizes']: content changed",
    ),
    "closure variable": (_in_cell, "first.callback, closure variable factor changed"),
    "parametrization": (
        lambda m: parametrize.register_parametrization(m.first.linear, "weight", nn.Identity()),
        "first.linear: class Linear -> ParametrizedLinear",
    ),
}


def make_model() -> Model:
    module = Model()
    module.first.spare = None
    return module


def _write_weights(m: Model) -> None:
    with torch.no_grad():
        for p in m.parameters():
            p.add_(1)
            p.data.copy_(torch.zeros_like(p))


def _train_step(m: Model) -> None:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    m(torch.ones(2, 4)).sum().backward()
    optimizer.step()


HARMLESS: dict[str, Callable[[Model], Any]] = {
    "nothing": lambda m: None,
    "call": lambda m: m(torch.ones(2, 4)),
    "weights written in place": _write_weights,
    "training step": _train_step,
    "load_state_dict": lambda m: m.load_state_dict(Model().state_dict()),
    "same mode again": lambda m: m.train(),
    "there and back": lambda m: (m.eval(), m.train()),
    "accelerated": _set("_compiled_call_impl", print),
    "child compiled": lambda m: m.first.compile(backend="eager"),
    "state_dict hook": lambda m: m.first.register_state_dict_post_hook(lambda *a: None),
    "same dtype and device": lambda m: m.to("cpu", torch.float32),
    "gradients": lambda m: m.zero_grad(),
    "hook and its removal": lambda m: m.first.register_forward_hook(print).remove(),
    "saved and copied": lambda m: (copy.deepcopy(m.state_dict()), list(m.modules()), repr(m)),
}


class TaggedTensor(torch.Tensor):
    pass


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value
