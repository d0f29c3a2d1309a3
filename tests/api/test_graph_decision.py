"""Where Inductor's own result in a CUDA graph is the best, a warm process takes it from Inductor's
caches and traces nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.replays import Replay, patch_replay
from torch_cudal1.api import backend
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import find_device
from torch_cudal1.graph.graph_digest import compute_graph_digest
from torch_cudal1.store.context import make_context

pytestmark = pytest.mark.usefixtures("dynamo")

CPU = torch.device("cpu")


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> type[Replay]:
    return patch_replay(monkeypatch)


def remember(net: nn.Module, x: torch.Tensor, cache_dir: Path) -> None:
    """Plant the decision under the digest that the backend will look for."""
    settings = Settings(cache_dir=cache_dir)

    def note(gm: Any, inputs: Sequence[Any]) -> Any:
        place = make_context(find_device(list(inputs)), settings)
        name = compute_graph_digest(gm, inputs, extra=[repr(place.target), repr([])])
        assert isinstance(name, str)
        place.cache.put_decision_record(
            name, {"runs": "inductor+graph", "regions": []}, place.target, place.contract
        )
        return gm.forward

    torch.compile(net, backend=note)(x)
    torch._dynamo.reset()


def test_a_remembered_graph_is_compiled_by_inductor_alone(
    replay: type[Replay], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("a warm process must not trace")

    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    with torch.no_grad():
        remember(net, x, tmp_path)
        monkeypatch.setattr("torch_cudal1.graph.capture.trace", never)
        compiled = torch.compile(
            net, backend=backend.cudal1, options={"cache_dir": tmp_path, "strictness": "error"}
        )
        for _ in range(3):
            torch.testing.assert_close(compiled(x), net(x))
    assert replay.runs == 2
    assert telemetry.report().counters["graphs_remembered"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_on_a_gpu_weights_stay_live_and_outputs_stay_the_caller_s(tmp_path: Path) -> None:
    net, x = (
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda(),
        torch.randn(16, 64, device="cuda"),
    )
    with torch.no_grad():
        remember(net, x, tmp_path)
        compiled = torch.compile(
            net, backend=backend.cudal1, options={"cache_dir": tmp_path, "strictness": "error"}
        )
        results = [compiled(x * scale) for scale in (1, 2, 3, 4)]
        for scale, out in zip((1, 2, 3, 4), results, strict=True):
            torch.testing.assert_close(out, net(x * scale))
        net[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), net(x))
        net[0].weight.data = torch.randn(64, 64, device="cuda")
        torch.testing.assert_close(compiled(x), net(x))
    assert telemetry.report().counters["graphs_remembered"] == 1
    assert telemetry.report().counters.get("fallbacks", 0) == 0
