"""What Python finds under the names that a forward uses is replaced: a method of a helper's class, a
builtin, a function of torch, an attribute that a Python module did not have.

torch.compile does not see most of these.
"""

from __future__ import annotations

import builtins
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.situations.kit import DOORS, Door, Scene, SceneLayer, X, check, scenes_of
from tests.situations.test_outside_state import answers, around

SWITCHES = types.ModuleType("switches")
_MISSING = object()


def answers_until_restored(door: Door, module: nn.Module, owner: Any, name: str, value: Any) -> Any:
    """What is answered before and after `value` is put into a namespace that others share."""
    before = vars(owner).get(name, _MISSING)
    try:
        return answers(door, module, replace(owner, name, value))
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """A change that puts `value` there."""
    return lambda: setattr(owner, name, value)


def apply_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def make_helper(**names: Any) -> Any:
    """An instance of a class of its own with these names in its body."""
    return type("Helper", (), names)()


def a_method_of_a_helper(door: Door) -> Any:
    helper = make_helper(apply=lambda self, x: x * 2)
    return answers(
        door,
        around(lambda self, x: helper.apply(self.h(x))),
        replace(type(helper), "apply", lambda self, x: x * 5),
    )


def a_method_of_a_helper_in_an_attribute(door: Door) -> Any:
    module = around(lambda self, x: self.helper.apply(self.h(x)))
    module.helper = make_helper(apply=lambda self, x: x * 2)
    change = replace(type(module.helper), "apply", lambda self, x: x * 5)
    return answers(door, module, change)


def code_of_a_helpers_method(door: Door) -> Any:
    def apply(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def other(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 5

    helper = make_helper(apply=apply)
    return answers(
        door,
        around(lambda self, x: helper.apply(self.h(x))),
        replace(apply, "__code__", other.__code__),
    )


def a_method_that_comes_before_the_base_classes(door: Door) -> Any:
    base = type("Base", (), {"apply": lambda self, x: x * 2})
    helper = type("Derived", (base,), {})()
    return answers(
        door,
        around(lambda self, x: helper.apply(self.h(x))),
        replace(type(helper), "apply", lambda self, x: x * 5),
    )


def a_method_of_an_argument(door: Door) -> Any:
    helper = make_helper(apply=lambda self, x: x * 2)
    call = door(around(lambda self, x, helper: helper.apply(self.h(x))), X, helper)
    results = [call(X, helper).clone() for _ in range(3)]
    type(helper).apply = lambda self, x: x * 5
    return [*results, *(call(X, helper).clone() for _ in range(3))]


def make_class_method_owner() -> Any:
    class Owner:
        # Of its own name: Dynamo asks the class for a method by the name of its function.
        @classmethod
        def apply(cls, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    return Owner


def a_class_method_of_another_class(door: Door) -> Any:
    kind = make_class_method_owner()
    return answers(
        door,
        around(lambda self, x: kind.apply(self.h(x))),
        replace(kind, "apply", classmethod(lambda cls, x: x * 5)),
    )


def an_inherited_class_method(door: Door) -> Any:
    base = make_class_method_owner()
    kind: Any = type("Kind", (base,), {})
    return answers(
        door,
        around(lambda self, x: kind.apply(self.h(x))),
        replace(base, "apply", classmethod(lambda cls, x: x * 5)),
    )


def the_bases_of_a_class(door: Door) -> Any:
    first, second = type("First", (), {}), type("Second", (), {})
    kind = type("Kind", (first,), {})
    return answers(
        door,
        around(lambda self, x: self.h(x) * (2 if issubclass(kind, first) else 5)),
        replace(kind, "__bases__", (second,)),
    )


def a_length(door: Door) -> Any:
    helper = make_helper(__len__=lambda self: 2)
    return answers(
        door,
        around(lambda self, x: self.h(x) * len(helper)),
        replace(type(helper), "__len__", lambda self: 5),
    )


def an_item(door: Door) -> Any:
    helper = make_helper(__getitem__=lambda self, index: 2.0)
    return answers(
        door,
        around(lambda self, x: self.h(x) * helper[0]),
        replace(type(helper), "__getitem__", lambda self, index: 5.0),
    )


def a_truth(door: Door) -> Any:
    helper = make_helper(__bool__=lambda self: True)
    return answers(
        door,
        around(lambda self, x: self.h(x) * (2 if helper else 5)),
        replace(type(helper), "__bool__", lambda self: False),
    )


def an_attribute_that_a_method_makes(door: Door) -> Any:
    helper = make_helper(__getattr__=lambda self, name: 2.0)
    return answers(
        door,
        around(lambda self, x: self.h(x) * helper.gain),
        replace(type(helper), "__getattr__", lambda self, name: 5.0),
    )


def a_property_of_a_metaclass(door: Door) -> Any:
    meta = type("Meta", (type,), {"gain": property(lambda cls: 2.0)})
    kind = meta("Kind", (), {})
    return answers(
        door,
        around(lambda self, x: self.h(x) * kind.gain),
        replace(meta, "gain", property(lambda cls: 5.0)),
    )


def a_name_that_a_python_module_gets(door: Door) -> Any:
    vars(SWITCHES).pop("fast", None)
    forward = lambda self, x: self.h(x) * (5 if hasattr(SWITCHES, "fast") else 2)
    return answers(door, around(forward), replace(SWITCHES, "fast", True))


def a_default_for_a_name_of_a_python_module(door: Door) -> Any:
    vars(SWITCHES).pop("gain", None)
    forward = lambda self, x: self.h(x) * getattr(SWITCHES, "gain", 2.0)
    return answers(door, around(forward), replace(SWITCHES, "gain", 5.0))


def a_builtin(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * divmod(7, 3)[0])
    return answers_until_restored(door, module, builtins, "divmod", lambda *values: (5, 0))


def a_number_among_the_builtins(door: Door) -> Any:
    forward = lambda self, x: self.h(x) * scene_gain  # type: ignore[name-defined] # noqa: F821
    builtins.scene_gain = 2.0  # type: ignore[attr-defined]
    return answers_until_restored(door, around(forward), builtins, "scene_gain", 5.0)


def a_global_name_before_a_builtin(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * max(1, 2))
    this = sys.modules[__name__]
    return answers_until_restored(door, module, this, "max", lambda *values: 5)


def a_function_of_torch_behind_a_helper(door: Door) -> Any:
    helper = types.ModuleType("scene_helper")
    helper.apply = apply_sine  # type: ignore[attr-defined]
    module = around(lambda self, x: helper.apply(self.h(x)))
    return answers_until_restored(door, module, torch, "sin", torch.cos)


def a_method_of_tensors(door: Door) -> Any:
    module = around(lambda self, x: self.h(x).tanh())
    return answers_until_restored(door, module, torch.Tensor, "tanh", torch.Tensor.exp)


def a_function_of_the_standard_library(door: Door) -> Any:
    module = around(lambda self, x: self.h(x) * math.erf(1.0))
    return answers_until_restored(door, module, math, "erf", lambda value: 5.0)


def a_switch_of_torch(door: Door) -> Any:
    forward = lambda self, x: self.h(x) * (2 if torch.backends.mha.get_fastpath_enabled() else 5)
    try:
        return answers(
            door, around(forward), lambda: torch.backends.mha.set_fastpath_enabled(False)
        )
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def a_precision_that_the_forward_asks_for(door: Door) -> Any:
    forward = lambda self, x: self.h(x) * (2 if torch.backends.cuda.matmul.allow_tf32 else 5)
    try:
        return answers(
            door, around(forward), replace(torch.backends.cuda.matmul, "allow_tf32", True)
        )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def a_method_of_a_parent(door: Door) -> Any:
    class Parent(SceneLayer):
        def scale_by(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Child(Parent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().scale_by(self.h(x))

    return answers(door, Child(), replace(Parent, "scale_by", lambda self, x: x * 5))


def the_forward_of_a_layer_of_torch(door: Door) -> Any:
    module = around(lambda self, x: self.act(self.h(x)))
    module.act = nn.Tanh()
    return answers_until_restored(door, module, nn.Tanh, "forward", lambda self, x: x * 5)


SCENES: tuple[Scene, ...] = scenes_of(globals())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_answer_is_that_of_what_the_names_lead_to(
    scene: Scene, door: str, tmp_path: Path
) -> None:
    check(scene, door, tmp_path)
