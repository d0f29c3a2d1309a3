"""Arguments become JSON and come back as they were, and what is neither plain nor a tensor is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.wire.call_spec import (
    CallSpec,
    RunMode,
    count_tensors,
    find_tensor_order,
    pack_arguments,
    unpack_arguments,
)

X, Y = torch.ones(2), torch.zeros(3)
ARGUMENTS: list[Any] = [
    {"args": (1, 2.5, "text", True, None), "kwargs": {}},
    {"args": ([X, [Y]], (X, ())), "kwargs": {"dtype": torch.float16, "sizes": {"a": Y, "1": 2}}},
    {"args": (), "kwargs": {"tensor": {"tensor": 0}, "tuple": {"tuple": []}}},
]


def pack_call(*args: Any, **kwargs: Any) -> Any:
    return pack_arguments({"args": args, "kwargs": kwargs}, [])


@pytest.mark.parametrize("value", ARGUMENTS, ids=["plain", "nested", "named as packed ones"])
def test_arguments_come_back_with_their_types(value: Any) -> None:
    tensors: list[torch.Tensor] = []
    packed = json.loads(json.dumps(pack_arguments(value, tensors)))
    assert count_tensors(packed) == len(tensors)
    unpacked = unpack_arguments(packed, [tensor + 5 for tensor in tensors])
    expected = repr(value).replace("tensor([1., 1.])", "tensor([6., 6.])")
    assert repr(unpacked) == expected.replace("tensor([0., 0., 0.])", "tensor([5., 5., 5.])")


def test_a_tensor_that_needs_a_gradient_is_packed_without_it() -> None:
    tensors: list[torch.Tensor] = []
    pack_arguments([torch.ones(2, requires_grad=True)], tensors)
    assert not tensors[0].requires_grad


@pytest.mark.parametrize(
    ("value", "kind"), [(print, "builtin_function_or_method"), ({1, 2}, "set"), (1j, "complex")]
)
def test_a_value_that_json_cannot_hold_is_refused_by_its_type(value: object, kind: str) -> None:
    with pytest.raises(SandboxError, match=f"an argument of type {kind}"):
        pack_arguments({"args": (1, [value]), "kwargs": {}}, [])


def test_a_constructor_takes_no_tensors() -> None:
    with pytest.raises(SandboxError, match="an argument of type Tensor"):
        pack_arguments({"args": [X], "kwargs": {}}, None)


@pytest.mark.parametrize(
    ("call", "order"),
    [
        (pack_call(X, Y), [0, 1]),
        (pack_call(), []),
        (pack_call(X, 1), None),
        (pack_call(X, (Y,)), None),
        (pack_call(X, other=Y), None),
    ],
)
def test_only_a_call_of_positional_tensors_has_an_order(call: Any, order: list[int] | None) -> None:
    assert find_tensor_order(call) == order


def test_a_spec_and_a_mode_survive_json() -> None:
    spec = CallSpec("Model", pack_call(4), ("weight", "bias"), pack_call(X), 7)
    assert CallSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    mode = RunMode(training=True, autocast="bfloat16", compiled="default")
    assert RunMode(**json.loads(json.dumps(mode.to_json()))) == mode
