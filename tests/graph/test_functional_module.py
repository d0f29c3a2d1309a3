"""A module as flat tensors in and out, and copies of it that call none of its own layers."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.modules import Closed, Returns
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.functional_module import (
    FunctionalModule,
    copy_module,
    copy_sharing_tensors,
    list_running_statistics,
    preserve_random_state,
    preserve_versions,
)


def test_a_copy_of_our_own_computes_with_its_own_layers() -> None:
    module, x = Closed().eval(), torch.randn(3, 8)
    copied = copy_module(module)
    with torch.no_grad():
        before = copied(x)
        module.parts["up"].weight.zero_()
        assert torch.equal(copied(x), before)
        copied.parts["up"].weight.mul_(2)
        assert not torch.equal(copied(x), before)


X = torch.randn(3, 8)


class Structured(nn.Module):
    """A dict in, plain values and nested containers out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
        out = self.linear(batch["x"]) * scale
        return {"out": [out, out + 1], "scale": scale, "none": None}


def test_a_call_is_flattened_and_its_result_has_the_modules_own_form() -> None:
    module, call = Structured(), ({"x": X, "name": "a"},)
    flat = FunctionalModule(module, call, {"scale": 2.0})
    assert [tensor is X for tensor in flat.tensors] == [True]
    results = flat(*flat.tensors)
    assert [type(result) for result in results] == [torch.Tensor, torch.Tensor]
    output = flat.wrap_compiled(lambda x: flat(x))(({"x": X * 3, "name": "a"},), {"scale": 2.0})
    expected = module({"x": X * 3, "name": "a"}, 2.0)
    assert (output["scale"], output["none"]) == (2.0, None)
    assert torch.equal(output["out"][1], expected["out"][1])


def test_a_single_tensor_needs_nothing_to_finish_it() -> None:
    flat = FunctionalModule(nn.Linear(8, 8), (X,), {})
    flat(X)
    assert flat.make_output_builder() is None


class Assigning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x + self.count


class Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Assigning(), "assigns count"),
        (Drawing(), "Python's random module"),
        (Returns(lambda x: (x, object())), "the output holds a object"),
    ],
    ids=["an assigned buffer", "a random number of Python", "an object in the output"],
)
def test_what_a_graph_of_tensors_cannot_repeat_is_refused(module: nn.Module, reason: str) -> None:
    flat = FunctionalModule(module, (X,), {})
    with pytest.raises(NotLowerableError, match=reason):
        flat(X)


def test_an_input_that_is_no_plain_tensor_is_a_problem() -> None:
    assert FunctionalModule(nn.Linear(8, 8), (X,), {}).refusal is None
    refusal = FunctionalModule(nn.Linear(8, 8), (X.to_sparse(),), {}).refusal
    assert "sparse_coo" in str(refusal)


def test_random_generators_are_put_back_and_named() -> None:
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    with preserve_random_state() as moved:
        torch.rand(3)
        random.random()
    assert moved == ["torch's generator", "Python's random module"]
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    with preserve_random_state() as moved:
        torch.ones(3)
    assert moved == []


def test_a_copy_to_trace_shares_every_tensor_and_nothing_else() -> None:
    module = nn.LSTM(4, 4)
    module.state = torch.zeros(4)
    copied = copy_sharing_tensors(module)
    assert copied.weight_ih_l0 is module.weight_ih_l0
    assert dict(copied.named_buffers())["state"] is module.state
    assert "state" not in copied.state_dict()
    assert "state" in vars(module)
    assert "flatten_parameters" not in vars(module)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()
    with pytest.raises(NotLowerableError, match="cannot be copied for tracing"):
        copy_sharing_tensors(module)


def test_statistics_of_batch_norm_are_written_without_a_new_version() -> None:
    norm = nn.BatchNorm1d(8)
    assert len(list_running_statistics(norm)) == 3
    assert list_running_statistics(nn.BatchNorm1d(8).eval()) == []
    before = norm.running_mean._version
    write = preserve_versions(lambda args, kwargs: norm.running_mean.add_(1), norm)
    write((), {})
    assert norm.running_mean._version == before
    norm.running_mean.add_(1)
    assert norm.running_mean._version == before + 1
