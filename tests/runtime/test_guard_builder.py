"""The walk of a module records all that a call may depend on, and refuses what cannot be watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from tests.runtime import guard_cases
from tests.runtime.guard_cases import (
    GAIN_TABLE,
    Model,
    StatefulBlock,
    TaggedTensor,
    bind,
    helper,
    make_model,
    nest,
)
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.runtime.guard import (
    bind_guard,
)


@pytest.mark.parametrize(
    "name", ["_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"]
)
def test_hooks_for_every_module_end_the_guard(name: str, implementation: Any) -> None:
    module_guard = bind(Model(), implementation)
    registry = getattr(torch_module, name)
    registry[-1] = print
    try:
        assert not module_guard.holds()
        assert name in module_guard.explain_difference()
        assert isinstance(bind_guard(Model()), Refusal)
    finally:
        del registry[-1]
    assert module_guard.holds()


OUTSIDE: dict[str, tuple[object, str, object, str]] = {
    "method patched": (
        StatefulBlock,
        "step",
        lambda self, x: x,
        "class StatefulBlock: step changed",
    ),
    "class attribute": (StatefulBlock, "slope", 0.2, "class StatefulBlock: slope changed"),
    "torch class patched": (
        nn.Linear,
        "forward",
        lambda self, x: x,
        "class Linear: forward changed",
    ),
    "module call patched": (
        nn.Module,
        "__call__",
        lambda self, x: x,
        "class Module: __call__ changed",
    ),
    "torch function patched": (torch.nn.functional, "relu", torch.tanh, "functional.relu"),
    "global flag": (guard_cases, "FLAG", 2.0, "FLAG changed"),
    "global function": (guard_cases, "helper", torch.tanh, "helper changed"),
    "code reloaded": (helper, "__code__", (lambda x: x).__code__, "helper: code changed"),
}


@pytest.mark.parametrize("change", OUTSIDE)
def test_patched_classes_globals_and_code_end_the_guard(
    change: str, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module_guard = bind(make_model(), implementation)
    owner, name, value, words = OUTSIDE[change]
    monkeypatch.setattr(owner, name, value)
    assert not module_guard.holds()
    assert words in module_guard.explain_difference()


@pytest.mark.parametrize("table", [GAIN_TABLE, StatefulBlock.table])
def test_small_containers_of_classes_and_globals_are_watched(
    table: dict[str, float], implementation: Any
) -> None:
    module_guard = bind(make_model(), implementation)
    table["new"] = 1.0
    try:
        assert not module_guard.holds()
        assert "'new' added" in module_guard.explain_difference()
    finally:
        del table["new"]
    assert module_guard.holds()


def test_hidden_modules_in_plain_containers_are_watched(implementation: Any) -> None:
    module = nn.Module()
    module.hidden = [nn.Linear(2, 2)]
    module_guard = bind(module, implementation)
    module.hidden[0].eval()
    assert module_guard.explain_difference() == "hidden[0]: training changed"
    assert not module_guard.holds()


class _Slots:
    __slots__ = ("value",)


class _Slotted(nn.Module):
    __slots__ = ("hidden",)


class _Listed(nn.Identity, list):  # type: ignore[type-arg]
    pass


class _MyDict(dict):  # type: ignore[type-arg]
    pass


def _with(name: str, value: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    setattr(module[0], name, value)
    return module


def _with_hook() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_pre_hook(print)
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooks": (_with_hook, "0._forward_pre_hooks: hooks are registered"),
    "scripted child": (lambda: nn.Sequential(torch.jit.script(nn.Tanh())), "ScriptModule"),
    "lazy parameter": (lambda: nn.Sequential(nn.LazyLinear(3)), "hooks|not initialised"),
    "tensor subclass": (
        lambda: _with("weight", nn.Parameter(torch.ones(2).as_subclass(TaggedTensor))),
        "0.weight is a TaggedTensor",
    ),
    "sparse buffer": (
        lambda: _with("extra", torch.eye(2).to_sparse()),
        "not a dense strided tensor",
    ),
    "long list": (lambda: _with("extra", list(range(2000))), "0.extra is a list of 2000 items"),
    "deep list": (lambda: _with("extra", nest(30)), "nest deeper"),
    "slots": (lambda: _with("extra", _Slots()), "_Slots, which can change unseen"),
    "module with slots": (lambda: nn.Sequential(_Slotted()), "0 is a _Slotted"),
    "module that is a list": (lambda: nn.Sequential(_Listed()), "0 is a _Listed"),
    "foreign object": (lambda: _with("extra", iter([1])), "list_iterator, which can change unseen"),
    "dict subclass": (lambda: _with("extra", _MyDict()), "subclass of a container"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_watched_is_refused_with_the_reason(case: str) -> None:
    make_module, words = REFUSED[case]
    refusal = bind_guard(make_module())
    assert isinstance(refusal, Refusal)
    assert any(word in refusal.reason for word in words.split("|")), refusal.reason


def test_recurrent_and_attention_modules_can_be_guarded(implementation: Any) -> None:
    for module in (
        nn.LSTM(3, 3),
        nn.TransformerEncoderLayer(4, 2),
        nn.BatchNorm2d(2),
        nn.ParameterList([torch.ones(1)]),
    ):
        assert bind(module, implementation).implementation == implementation


def test_a_cycle_of_modules_is_walked_once(implementation: Any) -> None:
    module = nn.Linear(2, 2)
    module.__dict__["me"] = [module]
    assert bind(module, implementation).holds()
