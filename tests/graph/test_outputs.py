"""A result is built anew for each call from the form that two runs with markers show; a result that
cannot be built again is refused with the reason.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.outputs import OutputTemplate, learn_outputs

RESULTS = [torch.full((2,), 1.0), torch.full((2,), 2.0)]
ARGUMENT, WEIGHT = torch.zeros(3), torch.ones(3)
SHARED: list[int] = []


class Point(NamedTuple):
    x: Any
    y: Any


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    step: int = 3

    def __post_init__(self) -> None:
        CONSTRUCTED.append(self)


CONSTRUCTED: list[Output] = []


class Slotted:
    __slots__ = ("first", "second")

    def __init__(self, value: Any) -> None:
        self.first = self.second = value


class SingleSlot:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class SlotBesideDict:
    __slots__ = ("__dict__", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.other = value, 1


class Tagged(dict[str, Any]):
    pass


def learn(
    make: Callable[[Sequence[torch.Tensor]], Any], fixed: dict[int, torch.Tensor] | None = None
) -> OutputTemplate:
    return learn_outputs(make, 2, [ARGUMENT], {id(WEIGHT): WEIGHT}, fixed or {})


FORMS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "a tuple": lambda out: (out[1], out[0], "plain", None),
    "nested containers": lambda out: {"a": [out[0], (out[1], 3)], "b": Color.RED},
    "an ordered dict": lambda out: collections.OrderedDict(b=out[0], a=out[1]),
    "a named tuple": lambda out: Point(out[0], [out[1]]),
    "a return type of torch": lambda out: torch.return_types.max((out[0], out[1])),
    "a dict of a class of its own": lambda out: Tagged(a=out[0]),
    "one output twice": lambda out: (out[0], out[0]),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_result_is_built_of_the_outputs_of_its_call(name: str) -> None:
    template = learn(FORMS[name])
    result, expected = template.build(RESULTS, [ARGUMENT]), FORMS[name](RESULTS)
    assert type(result) is type(expected)
    assert repr(result) == repr(expected)
    assert not template.first
    assert template.build(RESULTS, [ARGUMENT]) is not result


def test_the_first_output_itself_needs_no_building() -> None:
    assert learn(lambda out: out[0]).first
    assert not learn(lambda out: out[1]).first
    assert not learn(lambda out: out[0], fixed={0: WEIGHT}).first


def test_an_object_is_built_without_its_initialiser() -> None:
    template = learn(lambda out: Output(out[0]))
    constructed = len(CONSTRUCTED)
    result = template.build(RESULTS, [ARGUMENT])
    assert result.logits is RESULTS[0]
    assert result.step == 3
    assert len(CONSTRUCTED) == constructed


def test_arguments_are_those_of_the_call_and_guarded_tensors_the_very_same() -> None:
    template = learn(lambda out: (ARGUMENT, WEIGHT, out[0]))
    later = torch.full((3,), 9.0)
    result = template.build(RESULTS, [later])
    assert template.uses_arguments
    assert result[0] is later
    assert result[1] is WEIGHT
    assert not learn(lambda out: (WEIGHT, out[0])).uses_arguments


def tag(out: Sequence[torch.Tensor]) -> torch.Tensor:
    out[0].label = "users"
    return out[0]


def nest(out: Sequence[torch.Tensor]) -> Any:
    result: Any = out[0]
    for _ in range(40):
        result = [result]
    return result


counter = iter(range(100))
one_list: Callable[[Any], Any] = lambda part: [part, part]
REFUSED: dict[str, tuple[Callable[[Sequence[Any]], Any], str]] = {
    "an attribute of a tensor": (tag, "sets attributes of a tensor"),
    "deep nesting": (nest, "nests deeper than 32"),
    "a list from before": (lambda out: (out[0], SHARED), "was there before the call"),
    "an unknown tensor": (lambda out: torch.zeros(1), "neither computed, passed in"),
    "another type in each call": (
        lambda out: [out[0], 1 if next(counter) % 2 else "one"],
        "cannot be built again",
    ),
    "another length in each call": (lambda out: [0] * next(counter), "length differs"),
    "other keys in each call": (lambda out: {next(counter): out[0]}, "keys differ"),
    "one list twice": (lambda out: one_list([out[0]]), "holds one list twice"),
    "an object with slots": (lambda out: Slotted(out[0]), "cannot be built again from its"),
    "an object with one slot": (lambda out: SingleSlot(out[0]), "cannot be built again from its"),
    "a slot beside attributes": (lambda out: SlotBesideDict(out[0]), "cannot be built again from"),
    "a set": (lambda out: {"a"}, "cannot be built again from its attributes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_result_that_cannot_be_built_again_is_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(NotLowerableError, match=reason):
        learn(make)
