"""A signature of a call holds no value, and inputs made to it have it again."""

from __future__ import annotations

import json

import pytest
import torch

from torch_cudal1.core.call_signature import FormError, describe, make_inputs

CPU = torch.device("cpu")
CALL = (
    (torch.ones(2, 3).t(), {"mask": torch.zeros(2, dtype=torch.bool)}, 3, None, 0.5),
    [torch.float16],
)


def test_inputs_that_are_made_have_the_same_signature() -> None:
    signature = json.loads(json.dumps(describe(CALL)))
    assert describe(make_inputs(signature, CPU)) == signature


def test_elements_are_drawn_from_the_example_so_that_indices_stay_legal() -> None:
    indices = torch.tensor([7, 9])
    inputs = make_inputs(describe(indices), CPU, indices)
    assert set(inputs.tolist()) <= {7, 9}


def test_a_text_comes_from_the_example_only() -> None:
    assert describe("secret") == {"s": 0}
    assert make_inputs({"s": 0}, CPU, "own") == "own"
    with pytest.raises(FormError, match="texts are not recorded"):
        make_inputs({"s": 0}, CPU)


@pytest.mark.parametrize("value", [object(), {1: 2}, torch.nn.ReLU()])
def test_objects_have_no_signature(value: object) -> None:
    with pytest.raises(FormError):
        describe(value)


@pytest.mark.parametrize(
    "signature", [None, {}, {"x": 1}, {"t": [1]}, {"t": ["float32", [1 << 50], [1], "cpu", False]}]
)
def test_what_is_no_signature_is_refused(signature: object) -> None:
    with pytest.raises(FormError):
        make_inputs(signature, CPU)
