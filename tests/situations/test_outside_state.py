"""What a forward reads outside its module changes: the next call answers with what is there now."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import os
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.situations.kit import (
    DOORS,
    AcceleratedDoor,
    Door,
    Scene,
    SceneLayer,
    X,
    check,
    scenes_of,
)

GAIN: Any = 1.0
TABLE: dict[str, float] = {}
ROWS: list[float] = []
TENSOR: torch.Tensor = torch.ones(8)
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("gain", default=1.0)
HELPERS = types.ModuleType("helpers")


@dataclasses.dataclass
class GainConfig:
    gain: float = 1.0
    nested: Any = None


class SlottedGain:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class SharedGain:
    gain = 1.0

    @classmethod
    def factor(cls) -> float:
        return cls.gain

    @staticmethod
    def twice(value: float) -> float:
        return 2 * value


CONFIG = GainConfig(nested=GainConfig())
SLOTTED = SlottedGain()


def around(forward: Any) -> nn.Module:
    """A module whose forward is that function."""
    return type("Around", (SceneLayer,), {"forward": forward})()


def answers(
    door: Door, module: nn.Module, change: Any, x: torch.Tensor = X, calls: int = 3
) -> list[torch.Tensor]:
    """What is answered before the change, and several times after it."""
    call = door(module, x)
    results = [call(x).clone() for _ in range(2)]
    change()
    return [*results, *(call(x).clone() for _ in range(calls))]


def a_global_number(door: Door) -> Any:
    globals().update(GAIN=1.0)
    return answers(
        door, around(lambda self, x: self.h(x) * GAIN), lambda: globals().update(GAIN=3.0)
    )


def a_global_number_that_changes_back(door: Door) -> Any:
    globals().update(GAIN=1.0)
    call, results = door(around(lambda self, x: self.h(x) * GAIN), X), []
    for gain in (1.0, 3.0, 1.0, 3.0, 5.0, 1.0, 1.0, 3.0):
        globals().update(GAIN=gain)
        results.append(call(X).clone())
    return results


def a_global_function(door: Door) -> Any:
    globals().update(GAIN=lambda y: y + 1)
    return answers(
        door,
        around(lambda self, x: GAIN(self.h(x))),
        lambda: globals().update(GAIN=lambda y: y * 5),
    )


def a_helper_of_another_module(door: Door) -> Any:
    HELPERS.act = torch.sin  # type: ignore[attr-defined]
    return answers(
        door,
        around(lambda self, x: HELPERS.act(self.h(x))),
        lambda: setattr(HELPERS, "act", torch.cos),
    )


def code_of_a_helper(door: Door) -> Any:
    def helper(y: torch.Tensor) -> torch.Tensor:
        return y + 1

    def other(y: torch.Tensor) -> torch.Tensor:
        return y - 4

    return answers(
        door,
        around(lambda self, x: helper(self.h(x))),
        lambda: setattr(helper, "__code__", other.__code__),
    )


def a_config_object(door: Door) -> Any:
    CONFIG.gain = 1.0
    return answers(
        door, around(lambda self, x: self.h(x) * CONFIG.gain), lambda: setattr(CONFIG, "gain", 3.0)
    )


def a_nested_config(door: Door) -> Any:
    CONFIG.nested.gain = 1.0
    return answers(
        door,
        around(lambda self, x: self.h(x) * CONFIG.nested.gain),
        lambda: setattr(CONFIG.nested, "gain", 3.0),
    )


def a_config_that_is_replaced(door: Door) -> Any:
    CONFIG.nested = GainConfig()
    return answers(
        door,
        around(lambda self, x: self.h(x) * CONFIG.nested.gain),
        lambda: setattr(CONFIG, "nested", GainConfig(4.0)),
    )


def an_object_with_slots(door: Door) -> Any:
    SLOTTED.gain = 1.0
    return answers(
        door,
        around(lambda self, x: self.h(x) * SLOTTED.gain),
        lambda: setattr(SLOTTED, "gain", 3.0),
    )


def a_class_attribute_of_another_class(door: Door) -> Any:
    SharedGain.gain = 1.0
    return answers(
        door,
        around(lambda self, x: self.h(x) * SharedGain.gain),
        lambda: setattr(SharedGain, "gain", 3.0),
    )


def a_class_method(door: Door) -> Any:
    SharedGain.gain = 1.0
    return answers(
        door,
        around(lambda self, x: self.h(x) * SharedGain.factor()),
        lambda: setattr(SharedGain, "gain", 3.0),
    )


def a_patched_static_method(door: Door) -> Any:
    SharedGain.twice = staticmethod(lambda value: 2 * value)  # type: ignore[method-assign]
    change = functools.partial(setattr, SharedGain, "twice", staticmethod(lambda value: 7 * value))
    return answers(door, around(lambda self, x: self.h(x) * SharedGain.twice(1.0)), change)


def an_inherited_class_attribute(door: Door) -> Any:
    base = type("Base", (SceneLayer,), {"gain": 1.0})
    module = type("Derived", (base,), {"forward": lambda self, x: self.h(x) * self.gain})()
    return answers(door, module, lambda: setattr(base, "gain", 3.0))


def an_inherited_method(door: Door) -> Any:
    base = type("Base", (SceneLayer,), {"act": lambda self, y: y + 1})
    module = type("Derived", (base,), {"forward": lambda self, x: self.act(self.h(x))})()
    return answers(door, module, lambda: setattr(base, "act", lambda self, y: y * 5))


def a_closure_variable(door: Door) -> Any:
    gain = 1.0

    def change() -> None:
        nonlocal gain
        gain = 3.0

    return answers(door, around(lambda self, x: self.h(x) * gain), change)


def a_list_in_a_closure(door: Door) -> Any:
    box = [1.0]
    return answers(
        door, around(lambda self, x: self.h(x) * box[0]), lambda: box.__setitem__(0, 3.0)
    )


def an_object_in_a_closure(door: Door) -> Any:
    config = GainConfig()
    return answers(
        door, around(lambda self, x: self.h(x) * config.gain), lambda: setattr(config, "gain", 3.0)
    )


def a_mutable_default_argument(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, options: Any = {"gain": 1.0}) -> torch.Tensor:  # noqa: B006
        return self.h(x) * options["gain"]

    forward.__defaults__[0]["gain"] = 1.0  # type: ignore[index]
    return answers(door, around(forward), lambda: forward.__defaults__[0].update(gain=3.0))  # type: ignore[index]


def a_function_with_replaced_defaults(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        return self.h(x) * gain

    return answers(door, around(forward), lambda: setattr(forward, "__defaults__", (3.0,)))


def a_keyword_default(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        return self.h(x) * gain

    return answers(door, around(forward), lambda: setattr(forward, "__kwdefaults__", {"gain": 3.0}))


def a_dict_behind_a_global_name(door: Door) -> Any:
    TABLE.clear()
    TABLE["gain"] = 1.0
    return answers(
        door, around(lambda self, x: self.h(x) * TABLE["gain"]), lambda: TABLE.update(gain=3.0)
    )


def a_key_that_appears(door: Door) -> Any:
    TABLE.clear()
    return answers(
        door,
        around(lambda self, x: self.h(x) * TABLE.get("gain", 1.0)),
        lambda: TABLE.update(gain=3.0),
    )


def the_length_of_a_list(door: Door) -> Any:
    ROWS[:] = [1.0]
    return answers(door, around(lambda self, x: self.h(x) * len(ROWS)), lambda: ROWS.append(2.0))


def a_tensor_behind_a_global_name(door: Door) -> Any:
    globals().update(TENSOR=torch.ones(8))
    return answers(
        door,
        around(lambda self, x: self.h(x) * TENSOR),
        lambda: globals().update(TENSOR=torch.full((8,), 3.0)),
    )


def a_tensor_of_another_class(door: Door) -> Any:
    SharedGain.table = torch.ones(8)  # type: ignore[attr-defined]
    change = functools.partial(setattr, SharedGain, "table", torch.full((8,), 3.0))
    return answers(door, around(lambda self, x: self.h(x) * SharedGain.table), change)  # type: ignore[attr-defined]


def a_context_variable(door: Door) -> Any:
    def scene() -> Any:
        return answers(
            door, around(lambda self, x: self.h(x) * CONTEXT.get()), lambda: CONTEXT.set(3.0)
        )

    return contextvars.copy_context().run(scene)


def an_environment_variable(door: Door) -> Any:
    os.environ["SITUATION_GAIN"] = "1"
    return answers(
        door,
        around(lambda self, x: self.h(x) * float(os.environ["SITUATION_GAIN"])),
        lambda: os.environ.update(SITUATION_GAIN="3"),
    )


def call_in_turn(door: Door, forward: Any, *values: Any) -> list[torch.Tensor]:
    """What is answered with each value as the second argument, twice each."""
    call = door(around(forward), X, values[0])
    return [call(X, value).clone() for value in values for _ in range(2)]


def a_dict_argument_with_numbers_for_keys(door: Door) -> Any:
    return call_in_turn(
        door, lambda self, x, table: self.h(x) * table[1], {1: 1.0}, {1: 3.0}, {1: 3.0, 2: 1.0}
    )


def a_tensor_under_a_number_in_an_argument(door: Door) -> Any:
    forward = lambda self, x, table: self.h(x) * table[1][0]
    return call_in_turn(door, forward, *({1: [torch.full((size,), 2.0)]} for size in (8, 1)))


def an_argument_in_bytes(door: Door) -> Any:
    return call_in_turn(door, lambda self, x, text: self.h(x) * len(text), b"a", b"abc")


def a_complex_argument(door: Door) -> Any:
    return call_in_turn(door, lambda self, x, number: self.h(x) * number.real, 1 + 1j, 3 + 1j)


def an_ordered_dict_argument(door: Door) -> Any:
    tables = [collections.OrderedDict(gain=gain) for gain in (1.0, 3.0)]
    return call_in_turn(door, lambda self, x, table: self.h(x) * table["gain"], *tables)


def an_argument_nested_deeper_than_a_signature_looks(door: Door) -> Any:
    def nest(value: Any) -> Any:
        for _ in range(20):
            value = [value]
        return value

    def forward(self: SceneLayer, x: torch.Tensor, value: Any) -> torch.Tensor:
        while isinstance(value, list):
            (value,) = value
        return self.h(x) * value

    return call_in_turn(door, forward, nest(1.0), nest(3.0))


def a_memory_format_argument(door: Door) -> Any:
    forward = lambda self, x, layout: self.h(x) * (2.0 if layout is torch.channels_last else 1.0)
    return call_in_turn(door, forward, torch.contiguous_format, torch.channels_last)


def an_attribute_of_this_thread(door: Door) -> Any:
    local, results = threading.local(), []
    local.gain = 1.0
    module = around(lambda self, x: self.h(x) * local.gain)
    results += answers(door, module, lambda: setattr(local, "gain", 3.0))
    grad = torch.is_grad_enabled()

    def elsewhere() -> None:
        local.gain = 5.0
        with torch.set_grad_enabled(grad):
            results.extend(module(X).clone() for _ in range(3))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    return results


def keyword_defaults_that_are_written(door: Door) -> Any:
    def scaled(x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        return x * gain

    return answers(
        door,
        around(lambda self, x: scaled(self.h(x))),
        lambda: scaled.__kwdefaults__.update(gain=3.0),
    )


def a_partial_that_gets_another_state(door: Door) -> Any:
    times = lambda gain, x: x * gain
    scaled = functools.partial(times, 1.0)
    return answers(
        door,
        around(lambda self, x: scaled(self.h(x))),
        lambda: scaled.__setstate__((times, (3.0,), {}, {})),
    )


def an_environment_variable_asked_for_with_getenv(door: Door) -> Any:
    os.environ.pop("SITUATION_NEW", None)
    forward = lambda self, x: self.h(x) * float(os.getenv("SITUATION_NEW", "1"))
    results = answers(door, around(forward), lambda: os.environ.update(SITUATION_NEW="3"))
    os.environ.pop("SITUATION_NEW", None)
    return results


def an_environment_variable_that_appears(door: Door) -> Any:
    os.environ.pop("SITUATION_NEW", None)
    forward = lambda self, x: self.h(x) * float(os.environ.get("SITUATION_NEW", "1"))
    results = answers(door, around(forward), lambda: os.environ.update(SITUATION_NEW="3"))
    os.environ.pop("SITUATION_NEW", None)
    return results


def inference_mode(door: Door) -> Any:
    call = door(
        around(lambda self, x: self.h(x) * (2.0 if torch.is_inference_mode_enabled() else 1.0)), X
    )
    results = [call(X).clone()]
    with torch.inference_mode():
        results += [call(X).clone() for _ in range(3)]
    return [tensor.clone() for tensor in results]


def grad_mode(door: Door) -> Any:
    call = door(around(lambda self, x: self.h(x) * (2.0 if torch.is_grad_enabled() else 1.0)), X)
    results = [call(X).clone()]
    with torch.enable_grad():
        results += [call(X).detach().clone() for _ in range(3)]
    return results


def a_default_dtype(door: Door) -> Any:
    call, results = door(around(lambda self, x: self.h(x) + torch.ones(8)), X), []
    try:
        for dtype in (torch.float32, torch.float64, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            results.append(call(X).clone())
    finally:
        torch.set_default_dtype(torch.float32)
    return results


def autocast(door: Door) -> Any:
    call = door(around(lambda self, x: x @ self.weight), X)
    results = [call(X).clone()]
    with torch.autocast("cpu", torch.bfloat16):
        results += [call(X).clone() for _ in range(3)]
    return [*results, call(X).clone()]


def deterministic_algorithms(door: Door) -> Any:
    forward = lambda self, x: (
        self.h(x) * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0)
    )
    try:
        return answers(door, around(forward), lambda: torch.use_deterministic_algorithms(True))
    finally:
        torch.use_deterministic_algorithms(False)


def an_attribute_of_the_input(door: Door) -> Any:
    x = X.clone()
    x.gain = 1.0  # type: ignore[attr-defined]
    return answers(
        door, around(lambda self, x: self.h(x) * x.gain), lambda: setattr(x, "gain", 3.0), x
    )


def an_attribute_that_the_input_gets(door: Door) -> Any:
    x = X.clone()
    return answers(
        door,
        around(lambda self, x: self.h(x) * getattr(x, "gain", 1.0)),
        lambda: setattr(x, "gain", 3.0),
        x,
    )


def a_config_among_the_arguments(door: Door) -> Any:
    config, results = GainConfig(), []
    call = door(around(lambda self, x, config: self.h(x) * config.gain), X, config)
    for gain in (1.0, 1.0, 3.0, 3.0, 1.0):
        config.gain = gain
        results.append(call(X, config).clone())
    return [*results, call(X, GainConfig(7.0)).clone()]


def a_patched_class_of_a_child(door: Door) -> Any:
    child = type("Child", (nn.Module,), {"forward": lambda self, y: y + 1})
    module = around(lambda self, x: self.child(self.h(x)))
    module.child = child()
    return answers(door, module, lambda: setattr(child, "forward", lambda self, y: y * 5))


def a_partial_of_the_module(door: Door) -> Any:
    module = around(lambda self, x: self.act(self.h(x)))
    module.act = functools.partial(torch.nn.functional.leaky_relu, negative_slope=0.1)
    change = lambda: module.act.keywords.update(negative_slope=0.9)
    module.scale.neg_()
    return answers(door, module, change)


def a_property(door: Door) -> Any:
    kind = type("Held", (), {"gain": property(lambda self: self._gain)})
    instance = kind()
    instance._gain = 1.0
    return answers(
        door,
        around(lambda self, x: self.h(x) * instance.gain),
        lambda: setattr(instance, "_gain", 3.0),
    )


SCENES: tuple[Scene, ...] = scenes_of(globals())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_answer_is_that_of_what_is_there_now(scene: Scene, door: str, tmp_path: Path) -> None:
    check(scene, door, tmp_path)


def test_there_are_enough_scenes() -> None:
    assert len(SCENES) >= 38


@torch.no_grad()
def test_another_variable_is_none_of_its_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch itself sets some when it compiles: what reads the environment must not be bound anew
    for that.
    """
    forward = lambda self, x: self.h(x) * float(os.environ.get("SITUATION_NEW", "1"))
    monkeypatch.setenv("SITUATION_OTHER", "before")
    doors = AcceleratedDoor(tmp_path)
    module = doors(around(forward), X)
    (bound,) = module._compiled_call_impl.bindings.values()
    monkeypatch.setenv("SITUATION_OTHER", "after")
    assert bound.serves(module, (X,), {})
    monkeypatch.delenv("SITUATION_OTHER")
    monkeypatch.setenv("SITUATION_OTHER", "again")
    assert bound.serves(module, (X,), {})
    monkeypatch.setenv("SITUATION_NEW", "3")
    assert not bound.serves(module, (X,), {})
    assert "SITUATION_NEW" in bound.guard.explain_difference()
