"""A source is imported once from its text, and a reference file is described, or says what it lacks."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.wire.call_spec import CallSpec
from torch_cudal1.judge.worker.modules.source_modules import describe_reference, import_source

CPU = torch.device("cpu")
REFERENCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, features, scale=1.0):
        super().__init__()
        self.linear = torch.nn.Linear(features, 8)
        self.register_buffer("scale", torch.tensor(scale))
    def forward(self, x, flag=True):
        {body}
def get_inputs():
    return [torch.randn(4, 16), False]
def get_init_inputs():
    return [[16], {{"scale": 2.0}}]
"""
HONEST = REFERENCE.format(body="return self.linear(x) * self.scale")


def test_the_same_text_is_imported_once_and_its_functions_can_be_read(tmp_path: Path) -> None:
    text = "COUNT = []\ndef double(x):\n    return 2 * x\n"
    module = import_source(text, tmp_path)
    module.COUNT.append(1)
    assert import_source(text, tmp_path).COUNT == [1]
    assert import_source(text + "# another\n", tmp_path).COUNT == []
    assert inspect.getsource(module.double) == "def double(x):\n    return 2 * x\n"


def test_an_error_of_a_source_comes_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        import_source("1 / 0", tmp_path)
    # Nor does a part of it stay.
    with pytest.raises(ZeroDivisionError):
        import_source("1 / 0", tmp_path)


def test_a_description_has_the_call_the_roles_and_the_operations(tmp_path: Path) -> None:
    description, tensors = describe_reference(import_source(HONEST, tmp_path), "Model", CPU, 7)
    spec = CallSpec.from_json(description["form"])
    assert (spec.entry, spec.names, spec.seed) == (
        "Model",
        ("scale", "linear.weight", "linear.bias"),
        7,
    )
    assert spec.init == {
        "dict": {"args": [16], "kwargs": {"dict": {"scale": 2.0}}},
    }
    assert spec.call == {"dict": {"args": [{"tensor": 0}, False], "kwargs": {"dict": {}}}}
    assert description["roles"] == ["buffer", "parameter", "parameter", "input"]
    assert [tuple(tensor.shape) for tensor in tensors] == [(), (8, 16), (8,), (4, 16)]
    assert description["flops"] == 2 * 4 * 16 * 8


def test_the_same_seed_makes_the_same_example(tmp_path: Path) -> None:
    source = import_source(HONEST, tmp_path)
    first, again, other = (describe_reference(source, "Model", CPU, seed)[1] for seed in (1, 1, 2))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[-1], other[-1])


def test_a_model_that_writes_to_its_input_leaves_the_example_alone(tmp_path: Path) -> None:
    text = REFERENCE.format(body="return self.linear(x.zero_())")
    _, tensors = describe_reference(import_source(text, tmp_path), "Model", CPU, 1)
    assert bool(tensors[-1].any())


def test_a_call_that_fails_has_no_operations_and_a_description_all_the_same(tmp_path: Path) -> None:
    text = REFERENCE.format(body="raise ValueError('not today')")
    description, _ = describe_reference(import_source(text, tmp_path), "Model", CPU, 1)
    assert description["flops"] == 0


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("class Model(", "class Other(", "it defines no Model"),
        ("def get_inputs", "def inputs", "it defines no get_inputs"),
        ("[16], {", "[print], {", "an argument of type builtin_function_or_method"),
        ("[16], {", "[torch.ones(1)], {", "an argument of type Tensor"),
    ],
)
def test_what_a_reference_lacks_is_named(tmp_path: Path, old: str, new: str, reason: str) -> None:
    source = import_source(HONEST.replace(old, new), tmp_path)
    with pytest.raises(SandboxError, match=reason):
        describe_reference(source, "Model", CPU, 1)
