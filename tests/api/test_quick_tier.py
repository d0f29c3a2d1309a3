"""The quick tier: PyTorch's own ways are benchmarked in the user's process, the fastest stays, and the
next process does not repeat it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import cudal1
from tests.api.scripted_trial import make_summary
from torch_cudal1.api import quick_tier
from torch_cudal1.api.graphs import open_decisions
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.schedule import EAGER, INDUCTOR, INDUCTOR_GRAPH, REGIONAL, Schedule
from torch_cudal1.search.operator_timing import OperatorChoice
from torch_cudal1.search.tune import choose
from torch_cudal1.store.context import TuneContext, make_context

X = torch.randn(3, 4)
EAGER_GRAPH = Schedule("eager", cuda_graph=True)
REGIONAL_GRAPH = Schedule("regional", cuda_graph=True)
ALL = [INDUCTOR, INDUCTOR_GRAPH, EAGER_GRAPH]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + 1


@dataclass
class Contender:
    """Stands in for a built call: its name is its time."""

    schedule: str
    quarantined: str = ""
    fills: list[str] = field(default_factory=list)

    def with_refill(self) -> Contender:
        return self

    @property
    def filled(self) -> Any:
        return SimpleNamespace(swapped=[self], fill=lambda: self.fills.append(self.schedule))


class Trial:
    """Stands in for the example call."""

    written: frozenset[int] = frozenset()

    def arguments(self, device: torch.device) -> Any:
        return nullcontext(((X,), {}))

    def make_forward_step(self, args: Any, kwargs: Any) -> Any:
        return SimpleNamespace(schedule="own")

    def make_served_step(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        return call


@pytest.fixture
def context(tmp_path: Path) -> TuneContext:
    return make_context(torch.device("cpu"), Settings(cache_dir=tmp_path))


def decide(
    times_us: dict[str, float],
    context: TuneContext,
    monkeypatch: pytest.MonkeyPatch,
    failures: dict[str, Exception] | None = None,
    quarantined: dict[str, str] | None = None,
    schedules: Sequence[Schedule] = ALL,
) -> Any:
    """What `choose_schedule` decides where each schedule takes so long."""

    def benchmark(first: Any, second: Any, device: Any, **_: Any) -> Any:
        ratio = times_us[first.schedule] / times_us[second.schedule]
        return make_summary(ratio, ratio, ratio)

    def build(choices: Any, compiled: Any) -> Any:
        schedule = str(choices[0].candidate.schedule)
        base, _, graph = schedule.partition("+")
        # What Inductor has compiled is not compiled again for the graph around it.
        assert (compiled is not None) == (graph == "graph" and base in built)
        if schedule in (failures or {}):
            raise failures[schedule]
        built.append(schedule)
        return Contender(schedule, (quarantined or {}).get(schedule, ""))

    built: list[str] = []
    monkeypatch.setattr(open_decisions, "end_to_end_benchmark", benchmark)
    monkeypatch.setattr(quick_tier, "list_quick_schedules", lambda *_, **__: list(schedules))
    with torch.no_grad():
        regions = capture_regions(Net().eval(), (X,))
    return quick_tier.choose_schedule(Trial(), regions, context, build, lambda *_: None)


@pytest.mark.parametrize(
    ("inductor_us", "inductor_graph_us", "eager_graph_us", "winner"),
    [
        (5.0, 2.0, 3.0, INDUCTOR_GRAPH),
        (5.0, 3.0, 2.0, EAGER_GRAPH),
        (5.0, 6.0, 6.0, INDUCTOR),
        (11.0, 12.0, 13.0, EAGER),
        # Faster by less than noise: the simpler one stays.
        (9.9, 9.9, 9.9, EAGER),
        (5.0, 4.99, 4.98, INDUCTOR),
        (11.0, 5.0, 6.0, INDUCTOR_GRAPH),
    ],
)
def test_the_fastest_way_stays_and_of_equals_the_simplest(
    inductor_us: float,
    inductor_graph_us: float,
    eager_graph_us: float,
    winner: Schedule,
    context: TuneContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {
        "own": 10.0,
        "inductor": inductor_us,
        "inductor+graph": inductor_graph_us,
        "eager+graph": eager_graph_us,
    }
    choices, decision = decide(times, context, monkeypatch)
    assert choices[0].candidate.schedule == winner
    assert decision.winner == ("eager" if winner == EAGER else "cudal1")
    assert (decision.call is None) == (winner == EAGER)
    if decision.call is not None:
        # All contenders share one trace, and the last one built stands in it.
        assert decision.call.fills == [str(winner)]
    stored = choose(choices[0].region, context)
    assert stored.entry is not None
    assert stored.entry.is_quick
    assert stored.candidate.schedule == winner


def test_a_way_that_fails_costs_itself_only_and_its_reason_is_kept(
    context: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"own": 10.0, "inductor": 5.0, "inductor+graph": 1.0, "eager+graph": 2.0}
    choices, decision = decide(
        times,
        context,
        monkeypatch,
        failures={"inductor": RuntimeError("no compiler\nhere")},
        quarantined={"inductor+graph": "RuntimeError: operation not permitted when capturing"},
    )
    assert choices[0].candidate.schedule == EAGER_GRAPH
    assert "inductor failed (RuntimeError: no compiler)" in decision.note
    assert "not permitted when capturing" in decision.note
    assert choices[0].entry.evidence["baseline_failures"].keys() == {"inductor", "inductor+graph"}


BY_BLOCKS = [REGIONAL, REGIONAL_GRAPH, EAGER_GRAPH]


def test_blocks_are_compiled_in_place_of_the_whole(
    context: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"own": 10.0, "regional": 5.0, "regional+graph": 2.0, "eager+graph": 3.0}
    choices, decision = decide(times, context, monkeypatch, schedules=BY_BLOCKS)
    assert choices[0].candidate.schedule == REGIONAL_GRAPH
    # Nothing says that Inductor was left out: it compiled every block.
    assert choices[0].entry.without_inductor == ""
    assert decision.winner == "cudal1"


def test_where_blocks_fail_the_whole_is_compiled(
    context: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"own": 10.0, "inductor": 5.0, "inductor+graph": 2.0, "eager+graph": 3.0}
    choices, decision = decide(
        times,
        context,
        monkeypatch,
        failures={"regional": RuntimeError("a part of it does not compile")},
        schedules=BY_BLOCKS,
    )
    assert choices[0].candidate.schedule == INDUCTOR_GRAPH
    assert "regional failed (RuntimeError: a part of it does not compile)" in decision.note


def test_memory_that_does_not_last_leaves_the_modules_own_forward(
    context: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    choices, decision = decide(
        {"own": 1.0}, context, monkeypatch, failures=dict.fromkeys(map(str, ALL), error)
    )
    assert decision.winner == "eager"
    assert choices[0].candidate.schedule == EAGER
    assert decision.note.count("CUDA out of memory") == 3


def test_an_entry_of_a_search_is_not_replaced(
    context: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in quarantine: the next search begins with it."""
    from tests.entries import entry_for
    from torch_cudal1.ir.records import Candidate

    with torch.no_grad():
        (region,) = capture_regions(Net().eval(), (X,))
    searched = entry_for(region, Candidate(region.program, "eager", "baseline"), context.settings)
    context.cache.put(searched)
    times = {"own": 10.0, "inductor": 5.0, "inductor+graph": 1.0, "eager+graph": 2.0}
    choices, _ = decide(times, context, monkeypatch)
    assert choices[0].candidate.schedule == INDUCTOR_GRAPH
    stored = choose(region, context)
    assert stored.entry is not None
    assert not stored.entry.is_quick


def always_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_tier, "MIN_SPEEDUP_BEYOND_NOISE", 0.0)


def test_the_first_call_of_a_module_is_compiled_and_stored(
    dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_compile(monkeypatch)
    net = Net().eval()
    with torch.no_grad():
        expected = net(X)
        first = cudal1.accelerate(net, on_miss="quick", cache_dir=tmp_path, strictness="error")
        torch.testing.assert_close(first(X), expected)
        (region,) = cudal1.explain(first).regions
        assert region.runs == "inductor"
        assert region.reason.startswith("quick tier: ")
        torch._dynamo.reset()
        telemetry.reset()
        again = cudal1.accelerate(Net().eval(), X, on_miss="quick", cache_dir=tmp_path)
        assert cudal1.explain(again).regions[0].runs == "inductor"
        assert "judge.quick" not in telemetry.report().counters


def test_another_signature_is_compiled_when_it_comes_again(
    dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_compile(monkeypatch)
    net = Net().eval()
    with torch.no_grad():
        cudal1.accelerate(net, X, on_miss="quick", cache_dir=tmp_path, strictness="error")
        other = torch.randn(5, 4)
        expected = torch.tanh(net.linear(other)) + 1
        bound = []
        for _ in range(3):
            torch.testing.assert_close(net(other), expected)
            bound.append(len(cudal1.explain(net).regions))
    assert bound == [1, 2, 2]


def test_a_training_step_is_measured_as_a_whole(
    dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net()
    reference = Net()
    reference.load_state_dict(net.state_dict())
    cudal1.accelerate(net, X, on_miss="quick", cache_dir=tmp_path, strictness="error")
    for module in (net, reference):
        module(X).sum().backward()
    torch.testing.assert_close(net.linear.weight.grad, reference.linear.weight.grad)
    assert {region.kind for region in cudal1.explain(net).regions} == {"forward", "backward"}


GAINS = {"gain": 2.0}


@functools.lru_cache
def remember_gain() -> float:
    return GAINS["gain"]


class RemembersGain(Net):
    """Dynamo traces what the function would compute now, not what it remembers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * remember_gain()


class AsksForCompiler(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (5 if torch.compiler.is_compiling() else 2)


class AsksForGradMode(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (5 if torch.is_grad_enabled() else 2)


def test_a_forward_that_asks_for_the_grad_mode_is_compared_in_its_own(
    dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen, but called with gradients enabled."""
    always_compile(monkeypatch)
    net = AsksForGradMode().eval().requires_grad_(False)
    expected = net(X)
    cudal1.accelerate(net, on_miss="quick", cache_dir=tmp_path, strictness="error")
    for _ in range(2):
        torch.testing.assert_close(net(X), expected)
    assert not cudal1.explain(net).left_out


@pytest.mark.parametrize("kind", [RemembersGain, AsksForCompiler, Net])
@pytest.mark.parametrize("on_miss", ["quick", "tune"])
def test_a_trace_that_computes_something_else_is_not_used(
    kind: type[Net], on_miss: Any, dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_compile(monkeypatch)
    monkeypatch.setitem(GAINS, "gain", 2.0)
    remember_gain.cache_clear()
    net = kind().eval()
    with torch.no_grad():
        expected = net(X)
        GAINS["gain"] = 5.0
        example = () if on_miss == "quick" else (X,)
        cudal1.accelerate(
            net, *example, on_miss=on_miss, budget_s=1.0, cache_dir=tmp_path, strictness="error"
        )
        for _ in range(3):
            torch.testing.assert_close(net(X), expected)
    reasons = cudal1.explain(net).left_out
    differs = any("as Dynamo traced them, differ from its forward" in reason for reason in reasons)
    # A search that finds nothing faster has nothing to bind.
    assert differs == (kind is not Net) or on_miss == "tune"


class Counting(nn.Module):
    """Writes to what it keeps: a measurement must leave no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.shape[0], device=x.device) + self.position
        self.position.add_(x.shape[0])
        self.cache.index_copy_(0, index, self.linear(x))
        return torch.softmax(x @ self.cache.T, -1) @ self.cache


@pytest.mark.parametrize("door", ["accelerate", "backend"])
def test_what_a_call_writes_is_written_once(
    door: str, dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_compile(monkeypatch)
    net, reference = Counting().eval(), Counting().eval()
    reference.load_state_dict(net.state_dict())
    options = {"on_miss": "quick", "cache_dir": tmp_path, "strictness": "error"}
    with torch.no_grad():
        call = (
            cudal1.accelerate(net, **options)
            if door == "accelerate"
            else torch.compile(net, backend="cudal1", options=options)
        )
        for step in range(6):
            x = torch.randn(1, 4)
            torch.testing.assert_close(call(x), reference(x))
            assert int(net.position) == step + 1
            torch.testing.assert_close(net.cache, reference.cache)


def test_the_backend_runs_the_fastest_and_the_next_process_does_not_measure(
    dynamo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = iter([make_summary(1.5, 1.5, 1.5)])
    monkeypatch.setattr(open_decisions, "end_to_end_benchmark", lambda *_, **__: next(ratios))
    options = {"on_miss": "quick", "cache_dir": tmp_path, "strictness": "error"}
    with torch.no_grad():
        for _ in range(2):
            torch._dynamo.reset()
            net = Net().eval()
            call = torch.compile(net, backend="cudal1", options=options)
            torch.testing.assert_close(call(X), net(X))
    assert telemetry.report().counters["graphs_remembered"] == 1


def test_operators_are_chosen_one_kind_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        (region,) = capture_regions(Net().eval(), (X,))
    attention, convolution = object(), object()
    monkeypatch.setattr(
        quick_tier, "choose_attention", lambda *_: OperatorChoice(attention, ("attention",))
    )
    asked: list[Any] = []

    def choose_convolutions(program: Any, _: torch.device) -> OperatorChoice:
        asked.append(program)
        return OperatorChoice(convolution, ("convolution as product",))

    monkeypatch.setattr(quick_tier, "choose_convolutions", choose_convolutions)
    context = make_context(torch.device("cpu"), Settings(cache_dir=tmp_path))
    choice = quick_tier.choose_graph_operators([region], context, writes=False)
    assert choice == OperatorChoice(convolution, ("attention", "convolution as product"))
    assert asked == [attention]
    assert quick_tier.choose_graph_operators([region], context, writes=True) is None
    assert quick_tier.choose_graph_operators([region] * 2, context, writes=False) is None
