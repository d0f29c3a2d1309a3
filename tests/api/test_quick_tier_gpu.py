"""The quick tier on a GPU: CUDA graphs around what writes to a cache, and around outputs that share
memory.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cudal1
from tests.api.test_quick_tier import Counting
from tests.ir.stacks import ROWS, WIDTH, make_stack
from torch_cudal1.api import quick_tier
from torch_cudal1.core import telemetry
from torch_cudal1.ir.schedule import REGIONAL

pytestmark = pytest.mark.gpu


class Pooled(nn.Module):
    """Many small operators, and two results in one memory, as a vision transformer has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.layer_norm(self.layers(x), (16,))
        return hidden, hidden[:, 0]


def open_door(door: str, module: nn.Module, cache_dir: Path) -> Any:
    options = {"on_miss": "quick", "cache_dir": cache_dir, "strictness": "error"}
    if door == "accelerate":
        return cudal1.accelerate(module, **options)
    return torch.compile(module, backend="cudal1", options=options)


def list_contenders() -> dict[str, Any]:
    """What the quick tier measured, by contender: the reason of a failure, or the speed-up."""
    events = [event for event in telemetry.report().events if event.what == "quick"]
    facts = [event.facts for event in events]
    return {fact["contender"]: fact.get("failed", fact.get("speedup")) for fact in facts}


@pytest.mark.parametrize("door", ["accelerate", "backend"])
def test_a_cache_is_written_in_place_by_a_graph(
    door: str, dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, reference = Counting().eval().cuda(), Counting().eval().cuda()
    reference.load_state_dict(net.state_dict())
    with torch.no_grad():
        call = open_door(door, net, tmp_path)
        for step in range(8):
            x = torch.randn(1, 4, device="cuda")
            torch.testing.assert_close(call(x), reference(x), atol=1e-4, rtol=1e-4)
            assert int(net.position) == step + 1
            torch.testing.assert_close(net.cache, reference.cache, atol=1e-4, rtol=1e-4)
    assert float(list_contenders()["inductor+graph"]) > 0


@pytest.mark.parametrize("door", ["accelerate", "backend"])
def test_results_that_share_memory_share_it_after_a_replay(
    door: str, dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graph must run, whatever else this GPU does meanwhile.
    monkeypatch.setattr(quick_tier, "MIN_SPEEDUP_BEYOND_NOISE", 0.0)
    monkeypatch.setattr(quick_tier, "MIN_SPEEDUP_OVER_SIMPLER", 0.0)
    module = Pooled().eval().cuda()
    results = []
    with torch.no_grad():
        x = torch.randn(2, 3, 16, device="cuda")
        expected, _ = module(x)
        call = open_door(door, module, tmp_path)
        for _ in range(4):
            hidden, pooled = call(x)
            torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(pooled, hidden[:, 0])
            hidden[:, 0].fill_(7)
            assert torch.equal(pooled, torch.full_like(pooled, 7))
            results.append(hidden)
    assert len({hidden.data_ptr() for hidden in results}) == 4
    assert float(list_contenders()["inductor+graph"]) > 0


class Deep(nn.Module):
    """Equal layers, as a transformer has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_stack(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("door", ["accelerate", "backend"])
def test_layers_compiled_once_are_replayed_together(
    door: str, dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if door == "accelerate":
        # There eager in a graph comes last, here eager itself, which is never as fast.
        monkeypatch.setattr(quick_tier, "MIN_SPEEDUP_BEYOND_NOISE", 0.0)
        monkeypatch.setattr(quick_tier, "MIN_SPEEDUP_OVER_SIMPLER", 0.0)
        monkeypatch.setattr("torch_cudal1.search.quick.EAGER", REGIONAL)
    monkeypatch.setattr("torch_cudal1.search.quick.MIN_COPIED_STEPS", 10)
    original = Deep().eval().cuda()
    with torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            module = copy.deepcopy(original)
            call = open_door(door, module, tmp_path)
            results = []
            for _ in range(4):
                x = torch.randn(ROWS, WIDTH, device="cuda")
                results.append((call(x), original(x)))
            # What a caller holds stays as it was when it was returned.
            for result, expected in results:
                torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    events = telemetry.report().events
    # Measured in the first process only, and compiled by blocks in both.
    assert len([event for event in events if event.what == "by_blocks"]) == 2
    assert [event.facts["wrong"] for event in events if event.what == "recalled"] == [""]


class Noisy(nn.Module):
    """Draws random numbers in inference."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(torch.relu(self.linear(x)), 0.5, True)


@pytest.mark.parametrize("door", ["accelerate", "backend"])
def test_a_replayed_graph_draws_new_numbers_at_every_call(
    door: str, dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Graphs run wherever one may.
    monkeypatch.setattr(quick_tier, "MIN_SPEEDUP_BEYOND_NOISE", 0.0)
    monkeypatch.setattr(quick_tier, "MIN_SPEEDUP_OVER_SIMPLER", 0.0)
    module = Noisy().eval().cuda()
    x = torch.randn(64, 16, device="cuda")
    with torch.no_grad():
        call = open_door(door, module, tmp_path)
        call(x)
        torch.manual_seed(7)
        results = [call(x) for _ in range(4)]
        torch.manual_seed(7)
        expected = [module._call_impl(x) for _ in range(4)]
    assert len({tuple((result == 0).flatten().tolist()) for result in results}) == 4
    if door == "accelerate":  # torch.compile draws numbers of its own
        for result, own in zip(results, expected, strict=True):
            torch.testing.assert_close(result, own, atol=1e-5, rtol=1e-5)
