"""Training through an accelerated module: planted forward and backward swaps give eager's gradients
in every use of autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_cudal1
from tests.api.training_pairs import (
    Net,
    accelerate_pair,
    assert_same_gradients,
    collect_gradients,
    make_input,
    shorten_measurements,
)
from tests.entries import plant
from torch_cudal1.core import telemetry


@pytest.fixture(autouse=True)
def quick_measurement(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_measurements(monkeypatch)


def test_forward_and_backward_are_both_served_and_give_eager_s_gradients(runs, tmp_path):
    accelerated, plain = accelerate_pair(Net(), make_input(), tmp_path)
    x = make_input()
    for module in (accelerated, plain):
        module(x).square().mean().backward()
    assert_same_gradients(accelerated, plain)
    assert (runs.forward, runs.backward) == (1, 1)


def test_gradients_of_inputs(runs, tmp_path):
    accelerated, plain = accelerate_pair(Net(), make_input(grad=True), tmp_path)
    x, y = make_input(grad=True), None
    y = x.detach().clone().requires_grad_()
    accelerated(x).sum().backward()
    plain(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert runs.backward == 1


def test_a_module_without_parameters_differentiates_by_its_inputs(runs, tmp_path):
    accelerated, plain = accelerate_pair(nn.Softmax(dim=-1), make_input(grad=True), tmp_path)
    x = make_input(grad=True)
    (mine,) = torch.autograd.grad(accelerated(x).square().sum(), x)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    torch.testing.assert_close(mine, expected)
    assert runs.backward == 1


def test_the_whole_step_of_a_module_without_parameters_can_be_measured(tmp_path):
    module, x = nn.Softmax(dim=-1), make_input(grad=True)
    plant(module, x, tmp_path)
    for alias in tmp_path.rglob("*.json"):
        alias.unlink()
    torch_cudal1.accelerate(module, x, cache_dir=tmp_path, strictness="error")
    assert telemetry.report().counters["judge.end_to_end"] >= 1
    assert x.grad is None


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_ten_steps_of_an_optimizer_end_where_eager_ends(optimizer, runs, tmp_path):
    accelerated, plain = accelerate_pair(Net(), make_input(), tmp_path)
    steps = [(module, optimizer(module.parameters(), lr=0.05)) for module in (accelerated, plain)]
    for _ in range(10):
        x, target = make_input(), torch.randn(5, 4)
        for module, optim in steps:
            optim.zero_grad()
            nn.functional.mse_loss(module(x), target).backward()
            optim.step()
    for (name, mine), expected in zip(
        accelerated.named_parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, expected, msg=lambda text, name=name: f"{name}: {text}")
    assert (runs.forward, runs.backward) == (10, 10)


def test_retained_graphs_and_accumulated_gradients(runs, tmp_path):
    accelerated, plain = accelerate_pair(Net(), make_input(), tmp_path)
    x = make_input()
    for module in (accelerated, plain):
        loss = module(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        module(x * 2).sum().backward()
    assert_same_gradients(accelerated, plain)
    assert runs.backward == 3


class Hidden(nn.Module):
    """Saves what nobody but its backward sees: Inductor would write over that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(x @ self.first) * 2 @ self.second)


@pytest.mark.parametrize("winner", ["cudal1", "torch.compile"])
def test_a_graph_is_retained_after_one_that_was_not(winner, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torch_cudal1.api.module_trial.select_faster",
        lambda contenders, *arguments, **how: ([], [winner]),
    )
    module, x = Hidden(), make_input()
    accelerated, plain = accelerate_pair(module, x, tmp_path)
    for alias in tmp_path.rglob("*.json"):
        if "winner" in alias.read_text():
            alias.unlink()
    accelerated = torch_cudal1.accelerate(
        accelerated, x, cache_dir=tmp_path, on_miss="tune", strictness="error"
    )
    assert ("torch.compile runs" in torch_cudal1.explain(accelerated).gate[0]) == (
        winner == "torch.compile"
    )
    for kind in (accelerated, plain):
        kind(x).sum().backward()
        loss = kind(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(accelerated, plain)


def test_backward_twice_without_retaining_fails_as_in_eager(tmp_path):
    for module in accelerate_pair(Net(), make_input(), tmp_path):
        loss = module(make_input()).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_frozen_parameters_get_no_gradient(runs, tmp_path):
    net = Net()
    net.body[0].requires_grad_(False)
    accelerated, plain = accelerate_pair(net, make_input(), tmp_path)
    x = make_input()
    for module in (accelerated, plain):
        module(x).sum().backward()
    assert accelerated.body[0].weight.grad is None
    assert_same_gradients(accelerated, plain)
    accelerated.requires_grad_(True), plain.requires_grad_(True)
    for module in (accelerated, plain):
        module(x).sum().backward()
    assert_same_gradients(accelerated, plain)


def test_tied_weights_get_the_sum_of_both_gradients(runs, tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    net[2].weight = net[0].weight
    accelerated, plain = accelerate_pair(net, make_input(), tmp_path)
    x = make_input()
    for module in (accelerated, plain):
        module(x).sum().backward()
    assert_same_gradients(accelerated, plain)
    assert runs.backward == 1


def test_tensor_hooks_on_weights_and_outputs_run_once(runs, tmp_path):
    accelerated, _ = accelerate_pair(Net(), make_input(), tmp_path)
    calls: list[str] = []
    accelerated.body[0].weight.register_hook(lambda grad: calls.append("weight") or grad * 2)
    accelerated.body[0].weight.register_post_accumulate_grad_hook(
        lambda _: calls.append("accumulated")
    )
    out = accelerated(make_input())
    out.register_hook(lambda _: calls.append("output"))
    out.sum().backward()
    assert calls == ["output", "weight", "accumulated"]


def test_only_one_of_two_outputs_is_used(runs, tmp_path):
    class Two(Net):
        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x), self.body[0](x)

    accelerated, plain = accelerate_pair(Two(), make_input(), tmp_path)
    x = make_input()
    for module in (accelerated, plain):
        module(x)[1].sum().backward()
    for name, expected in collect_gradients(plain).items():
        mine = collect_gradients(accelerated)[name]
        torch.testing.assert_close(
            torch.zeros(()) if mine is None else mine.sum(),
            expected.sum() if expected is not None else torch.zeros(()),
        )
    assert runs.backward == 1


# --- random numbers


def test_dropout_is_alive_and_follows_eager_s_stream(runs, tmp_path):
    accelerated, plain = accelerate_pair(
        nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)), make_input(), tmp_path
    )
    x = make_input()
    masks = []
    for step in range(3):
        torch.manual_seed(step)
        mine = accelerated(x)
        torch.manual_seed(step)
        assert torch.equal(mine, plain(x))
        masks.append(mine == 0)
    assert not torch.equal(masks[0], masks[1])
    torch.manual_seed(0)
    first, second = accelerated(x), accelerated(x)
    assert not torch.equal(first == 0, second == 0)
    share = torch.stack([(accelerated(x) == 0).float().mean() for _ in range(50)]).mean()
    assert 0.45 < share < 0.55
    assert runs.forward > 50


def test_gradients_through_dropout_use_the_forward_s_mask(tmp_path):
    accelerated, plain = accelerate_pair(
        nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)), make_input(), tmp_path
    )
    x = make_input()
    for module in (accelerated, plain):
        torch.manual_seed(7)
        module(x).sum().backward()
    assert_same_gradients(accelerated, plain)


# --- what wraps a module


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("prepared", [True, False])
def test_activation_checkpointing_gives_eager_s_gradients_from_the_first_call_on(
    reentrant, prepared, tmp_path
):
    net, x = Net(), make_input(grad=True)
    plain = copy.deepcopy(net)
    plant(net, x, tmp_path)
    accelerated = torch_cudal1.accelerate(
        net, x if prepared else None, cache_dir=tmp_path, strictness="error"
    )
    for _ in range(4):
        for module in (accelerated, plain):
            checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
        assert_same_gradients(accelerated, plain)


def test_a_buffer_saved_by_an_earlier_call_may_be_used_while_another_call_is_measured(tmp_path):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.mask

    module, x = Masked(), make_input()
    plant(module, x, tmp_path)
    for alias in tmp_path.rglob("*.json"):
        alias.unlink()
    torch_cudal1.accelerate(module, cache_dir=tmp_path, strictness="error")
    first = module(x)  # not seen before: eager, and its graph holds the buffer
    module._compiled_call_impl.prepare((x,), {}, None)  # looked up, and measured
    second = module(x)
    assert telemetry.report().counters["judge.end_to_end"] >= 1
    (first.sum() + second.sum()).backward()
    assert module.linear.weight.grad is not None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel_around_an_accelerated_module(world, runs, tmp_path):
    accelerated, plain = accelerate_pair(Net(), make_input(), tmp_path)
    wrapped = nn.parallel.DistributedDataParallel(accelerated)
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in plain.state_dict()]
    for _ in range(3):
        x = make_input()
        wrapped(x).square().mean().backward()
        plain(x).square().mean().backward()
    assert_same_gradients(accelerated, plain)
    assert runs.backward == 3


def test_accelerating_what_is_already_distributed_trains_as_before(world, tmp_path):
    net = Net()
    plain = copy.deepcopy(net)
    wrapped = torch_cudal1.accelerate(
        nn.parallel.DistributedDataParallel(net), make_input(), cache_dir=tmp_path
    )
    for _ in range(3):
        x = make_input()
        wrapped(x).sum().backward()
        plain(x).sum().backward()
    assert_same_gradients(net, plain)


def test_a_batch_norm_called_twice_in_a_step_may_switch_to_the_swap_in_between(runs, tmp_path):
    accelerated, plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), None
    plain = copy.deepcopy(accelerated)
    x = make_input()
    plant(accelerated, x, tmp_path)
    torch_cudal1.accelerate(accelerated, cache_dir=tmp_path, strictness="error")
    for module in (
        accelerated,
        plain,
    ):  # eager's graph checks that the running statistics have no new version
        (module(x) + module(x + 1) + module(x - 1)).sum().backward()
    assert_same_gradients(accelerated, plain)
    torch.testing.assert_close(dict(accelerated.named_buffers()), dict(plain.named_buffers()))
    assert runs.forward == 2
