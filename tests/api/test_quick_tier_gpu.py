"""The quick tier on a GPU: CUDA graphs around what writes to a cache, and around outputs that share
memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cudal1
from tests.api.test_quick_tier import Counting
from torch_cudal1.api import quick_tier
from torch_cudal1.core import telemetry

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
