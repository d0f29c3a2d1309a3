"""Forwards that do more than compute: what a graph can repeat is repeated exactly, the rest is left
to the module with a reason.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.entries import Calls, accelerate_planted, find_left_out_reason, plant
from torch_cudal1.core import telemetry

pytestmark = pytest.mark.usefixtures("inference")


x8 = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def test_a_buffer_that_forward_writes_is_written_exactly_as_by_the_module(runs, tmp_path):
    accelerated, plain = (
        nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)),
        nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)),
    )
    plain.load_state_dict(accelerated.state_dict())
    accelerated = accelerate_planted(accelerated, x8, tmp_path)
    for scale in range(1, 4):
        assert torch.equal(accelerated(x8 * scale), plain(x8 * scale))
    for name, value in plain.state_dict().items():
        assert torch.equal(accelerated.state_dict()[name], value), name
    assert runs.total == 3


def test_an_input_that_forward_writes_is_written(runs, tmp_path):
    module = accelerate_planted(lambda m, x: m.linear(x.add_(1)), x8.clone(), tmp_path)
    x = x8.clone()
    output = module(x)
    assert torch.equal(x, x8 + 1)
    assert torch.equal(output, module.linear(x8 + 1))
    assert runs.total == 1


def test_binding_changes_neither_inputs_nor_buffers_nor_weights_nor_random_numbers(tmp_path):
    def make(module: Calls, x: torch.Tensor) -> torch.Tensor:
        module.linear.weight.mul_(0.9)
        module.count.add_(1)
        return nn.functional.dropout(module.linear(x.add_(1)), 0.5)

    module, x = Calls(make), x8.clone()
    plant(module, x, tmp_path)
    for alias in tmp_path.rglob("*.json"):
        alias.unlink()  # so that the whole call is measured
    state = {name: value.clone() for name, value in module.state_dict().items()}
    stream = torch.get_rng_state()
    torch_cudal1.accelerate(module, x, cache_dir=tmp_path, strictness="error")
    assert telemetry.report().counters["judge.end_to_end"] == 1
    assert torch.equal(x, x8)
    assert torch.equal(torch.get_rng_state(), stream)
    for name, value in state.items():
        assert torch.equal(module.state_dict()[name], value), name


def assigns_a_buffer(module: Calls, x: torch.Tensor) -> torch.Tensor:
    module.count = module.count * 0.9 + x.mean(0)
    return module.linear(x) + module.count


def counts_its_calls(module: Calls, x: torch.Tensor) -> torch.Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return module.linear(x) * module.calls


def keeps_what_it_saw(module: Calls, x: torch.Tensor) -> torch.Tensor:
    module.make.seen.append(module.linear(x))
    return module.make.seen[-1]


def draws_in_python(module: Calls, x: torch.Tensor) -> torch.Tensor:
    return module.linear(x) * random.random()


def draws_in_numpy(module: Calls, x: torch.Tensor) -> torch.Tensor:
    import numpy

    return module.linear(x) * float(numpy.random.rand())


def seeds_itself(module: Calls, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(42)
    return module.linear(x) + torch.rand(8)


def decides_by_value(module: Calls, x: torch.Tensor) -> torch.Tensor:
    return module.linear(x) if x.sum() > 0 else x


keeps_what_it_saw.seen = []  # type: ignore[attr-defined]
EFFECTS = {
    assigns_a_buffer: "assigns",
    counts_its_calls: "assigns self.calls",
    draws_in_python: "Random.random",
    draws_in_numpy: "Dynamo cannot capture it",
    seeds_itself: "manual_seed",
    decides_by_value: "Data-dependent branching",
}


@pytest.mark.parametrize("make", EFFECTS, ids=lambda make: make.__name__)
def test_an_effect_that_no_graph_repeats_is_left_to_the_module_with_the_reason(make, tmp_path):
    assert EFFECTS[make] in find_left_out_reason(make, x8, tmp_path)


def test_such_effects_happen_once_a_call_and_see_real_tensors(tmp_path):
    module = torch_cudal1.accelerate(Calls(assigns_a_buffer), x8, cache_dir=tmp_path)
    twin = Calls(assigns_a_buffer)
    twin.load_state_dict(module.state_dict())
    for _ in range(3):
        assert torch.equal(module(x8), twin(x8))
    assert torch.equal(module.count, twin.count)


@pytest.mark.parametrize(
    "make", [draws_in_python, draws_in_numpy, seeds_itself], ids=lambda make: make.__name__
)
def test_looking_at_such_a_module_moves_no_random_generator(make, tmp_path):
    import numpy

    module = Calls(make)
    before = random.getstate(), numpy.random.get_state()[2], torch.get_rng_state()
    torch_cudal1.accelerate(module, x8, cache_dir=tmp_path)
    after = random.getstate(), numpy.random.get_state()[2], torch.get_rng_state()
    assert after[:2] == before[:2]
    assert torch.equal(after[2], before[2])


def test_nothing_traced_stays_in_the_module(tmp_path):
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seen, self.last = nn.Linear(8, 8), [], None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.linear(x)
            self.seen.append(self.last)
            return self.last

    module = torch_cudal1.accelerate(Keeps(), x8, cache_dir=tmp_path)
    assert (module.seen, module.last) == ([], None)
    for _ in range(3):
        module(x8)
    assert [type(output) for output in module.seen] == [torch.Tensor] * 3


class Mine(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [Mine("a", 1), ValueError("b"), RuntimeError("c"), KeyError("d"), StopIteration("e")],
    ids=repr,
)
@pytest.mark.parametrize("strictness", ["silent", "warn"])
def test_an_exception_of_the_module_comes_out_unchanged(error, strictness, tmp_path):
    def make(module: Calls, x: torch.Tensor, fail: bool = True) -> torch.Tensor:
        if fail:
            raise error
        return module.linear(x)

    module = Calls(make)
    torch_cudal1.accelerate(module, x8, cache_dir=tmp_path, strictness=strictness)
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            module(x8)
        assert caught.value is error
    assert torch.equal(module(x8, False), module._call_impl(x8, False))


@pytest.mark.parametrize(("shape", "error"), [((3, 7), RuntimeError), ((8,), None)])
def test_a_wrong_shape_fails_as_without_us_and_a_right_one_does_not(shape, error, tmp_path):
    module = accelerate_planted(lambda m, x: m.linear(x), x8, tmp_path)
    y = torch.randn(shape)
    for _ in range(3):
        if error is None:
            assert torch.equal(module(y), module._call_impl(y))
            continue
        with pytest.raises(error, match="shapes cannot be multiplied"):
            module(y)


def test_an_index_out_of_range_is_the_user_s_error_and_leaves_the_swap_in_place(runs, tmp_path):
    module = accelerate_planted(nn.Embedding(4, 8), torch.tensor([1, 2]), tmp_path)
    with pytest.raises(IndexError, match="out of range"):
        module(torch.tensor([1, 9]))
    assert torch.equal(module(torch.tensor([3, 0])), module.weight[[3, 0]])
    assert telemetry.report().counters.get("fallbacks", 0) == 0
    assert runs.total == 2
