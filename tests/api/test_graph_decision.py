"""Where Inductor's own result in a CUDA graph is the best, a warm process takes it from Inductor's
caches and traces nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_cudal1
from torch_cudal1.api import backend
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import device_of
from torch_cudal1.graph import swap
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.graph_digest import graph_digest
from torch_cudal1.store.context import make_context

pytestmark = pytest.mark.usefixtures("dynamo")

CPU = torch.device("cpu")


class Replay:
    """Stands in for the CUDA graph: says when it ran, and fails when told to."""

    ran = 0
    fails = False

    def __init__(
        self, runner: Callable[..., Any], static: frozenset[int], device: torch.device
    ) -> None:
        self.runner, self.static = runner, static

    def __call__(self, inputs: Sequence[Any]) -> Any:
        if Replay.fails:
            raise RuntimeError("no graph today")
        Replay.ran += 1
        return self.runner(inputs)


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> type[Replay]:
    Replay.ran, Replay.fails = 0, False
    monkeypatch.setattr(swap, "GraphedRunner", Replay)
    return Replay


def later(strictness: str = "silent") -> swap.GraphedLater:
    return swap.GraphedLater(lambda x: (x + 1,), frozenset(), CPU, strictness)


def test_the_first_answer_waits_for_no_capture_and_the_second_call_is_a_replay(
    replay: type[Replay],
) -> None:
    call = later()
    assert float(call(torch.zeros(()))[0]) == 1
    assert replay.ran == 0
    assert float(call(torch.ones(()))[0]) == 2
    assert replay.ran == 1


def test_the_kill_switch_leads_to_what_inductor_compiled(replay: type[Replay]) -> None:
    call = later()
    call(torch.zeros(()))
    with torch_cudal1.disabled():
        assert float(call(torch.zeros(()))[0]) == 1
    assert replay.ran == 0


def test_after_a_failure_the_compiled_graph_runs_for_good_and_the_reason_is_kept(
    replay: type[Replay],
) -> None:
    call = later()
    call(torch.zeros(()))
    replay.fails = True
    assert float(call(torch.zeros(()))[0]) == 1
    assert call.quarantined == "RuntimeError: no graph today"
    replay.fails = False
    assert float(call(torch.zeros(()))[0]) == 1
    assert replay.ran == 0
    assert telemetry.report().counters["fallbacks"] == 1


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x)


class Returns(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


def fresh(x: torch.Tensor) -> Any:
    return (x.exp(),)


def an_input(x: torch.Tensor) -> Any:
    return (x.exp(), x.t())


def two_views_of_one(x: torch.Tensor) -> Any:
    y = x.exp()
    return (y[0], y[1])


def writing(x: torch.Tensor) -> Any:
    return (x.add_(1).exp(),)


@pytest.mark.parametrize(
    ("make", "pure"),
    [(fresh, True), (an_input, False), (two_views_of_one, False), (writing, False)],
)
def test_only_a_graph_without_writes_and_shared_outputs_is_pure(
    make: Callable[[torch.Tensor], Any], pure: bool
) -> None:
    with torch.no_grad():
        assert trace(Returns(make), [torch.randn(4, 4)]).is_pure is pure


def test_a_training_graph_is_not_pure() -> None:
    assert not trace(Returns(fresh), [torch.randn(4, 4, requires_grad=True)]).is_pure


def remember(net: nn.Module, x: torch.Tensor, cache_dir: Path) -> None:
    """Plant the decision under the digest that the backend will look for."""
    settings = Settings(cache_dir=cache_dir)

    def note(gm: Any, inputs: Sequence[Any]) -> Any:
        place = make_context(device_of(list(inputs)), settings)
        name = graph_digest(gm, inputs, extra=[repr(place.target), repr([])])
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
    assert replay.ran == 2
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
        held = [compiled(x * scale) for scale in (1, 2, 3, 4)]
        for scale, out in zip((1, 2, 3, 4), held, strict=True):
            torch.testing.assert_close(out, net(x * scale))
        net[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), net(x))
        net[0].weight.data = torch.randn(64, 64, device="cuda")
        torch.testing.assert_close(compiled(x), net(x))
    assert telemetry.report().counters["graphs_remembered"] == 1
    assert telemetry.report().counters.get("fallbacks", 0) == 0
