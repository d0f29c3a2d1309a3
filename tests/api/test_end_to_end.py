"""What won the benchmark runs in torch.compile's place only where Inductor's own result does not beat it
in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.api.scripted_trial import CLEAR_GAIN, make_summary
from tests.entries import entry_for, same
from torch_cudal1.api import end_to_end
from torch_cudal1.api.backend import cudal1
from torch_cudal1.api.end_to_end import GraphUnderTest, choose_faster_call, choose_faster_step
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Candidate
from torch_cudal1.judge.benchmark.statistics import PairedSummary
from torch_cudal1.search.tune import Choice

pytestmark = pytest.mark.usefixtures("dynamo")
CPU, X = torch.device("cpu"), torch.randn(2, 4)


class Inductor:
    """Stands in for Inductor: counts, and fails when told to."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.compiled = fails, 0

    def __call__(self) -> Callable[..., Any]:
        self.compiled += 1
        if self.fails:
            raise RuntimeError("no compiler here\nmore")
        return lambda x: ("inductor", x)


@pytest.fixture
def fix_speedup(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[Any]]:
    """Let every measurement find this speed-up; what was called meanwhile."""

    def to(speedup: float) -> list[Any]:
        called: list[Any] = []

        def pairs(run_a: Any, run_b: Any, device: torch.device, **_: Any) -> Any:
            called.extend((run_a(), run_b()))
            return []

        monkeypatch.setattr(end_to_end, "sample_pairs", pairs)
        result = PairedSummary(
            speedup, speedup, speedup, speedup, 1.0, 56, True, (speedup,) * 7, (speedup,) * 7
        )
        monkeypatch.setattr(end_to_end, "summarise", lambda _: result)
        return called

    return to


def graph(inductor: Inductor, *, pure: bool = True, benchmarked: bool = True) -> GraphUnderTest:
    return GraphUnderTest([X], CPU, inductor, pure, benchmarked)


def ours(inductor: Callable[[], Any]) -> Callable[..., Any]:
    return lambda x: ("ours", x)


@pytest.mark.parametrize(("speedup", "runs"), [(0.97, "inductor"), (1.0, "ours"), (1.4, "ours")])
@pytest.mark.parametrize("benchmarked", [True, False])
def test_the_faster_of_both_runs_where_the_graph_can_be_called(
    speedup: float, runs: str, benchmarked: bool, fix_speedup: Any
) -> None:
    called = fix_speedup(speedup)
    runs_text, call = choose_faster_call(graph(Inductor(), benchmarked=benchmarked), ours)
    assert (runs_text, call(X)[0]) == (runs, runs)
    assert [name for name, _ in called] == ["inductor", "ours"]
    (event,) = telemetry.report().events
    assert (event.what, event.facts["runs"], event.facts["speedup"]) == ("in_place", runs, speedup)


@pytest.mark.parametrize(
    ("benchmarked", "runs", "compiled"), [(True, "ours", 0), (False, "inductor", 1)]
)
def test_a_graph_that_writes_is_not_called_and_inductor_without_a_benchmark_is_not_replaced(
    benchmarked: bool, runs: str, compiled: int, fix_speedup: Any
) -> None:
    called, inductor = fix_speedup(2.0), Inductor()
    assert choose_faster_call(graph(inductor, pure=False, benchmarked=benchmarked), ours)[0] == runs
    assert (called, inductor.compiled) == ([], compiled)


@pytest.mark.parametrize("pure", [True, False])
def test_where_inductor_cannot_compile_ours_runs_and_the_reason_is_told(
    pure: bool, fix_speedup: Any
) -> None:
    fix_speedup(0.5)
    assert (
        choose_faster_call(graph(Inductor(fails=True), pure=pure, benchmarked=False), ours)[0]
        == "ours"
    )
    (event,) = telemetry.report().events
    assert event.facts["reason"] == "Inductor: RuntimeError: no compiler here"


def test_ours_may_be_made_of_what_inductor_compiled_and_nothing_is_compiled_twice(
    fix_speedup: Any,
) -> None:
    fix_speedup(1.2)
    inductor = Inductor()
    runs_text, call = choose_faster_call(
        graph(inductor), lambda compiled: lambda x: ("a graph of", *compiled()(x))
    )
    assert (runs_text, call(X)[:2], inductor.compiled) == ("ours", ("a graph of", "inductor"), 1)


def test_a_real_measurement_finds_the_slower_one() -> None:
    wide = torch.randn(512, 512)

    def slow(x: torch.Tensor) -> Any:
        for _ in range(50):
            wide @ wide
        return (x,)

    with torch.no_grad():
        assert (
            choose_faster_call(
                GraphUnderTest([X], CPU, lambda: lambda x: (x,), True, True), lambda _: slow
            )[0]
            == "inductor"
        )


# --- in the backend


@pytest.fixture
def eager_decision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Settings:
    """A benchmark without Inductor has chosen eager's operators one by one; Inductor's double returns
    the graph as it is.
    """

    def choose(region: Any, place: Any, **_: Any) -> Choice:
        candidate = Candidate(same(region.program), "eager", "rewrites", ("planted",))
        entry = entry_for(region, candidate, place.settings)
        entry.evidence.pop("baselines_us")
        entry.evidence.update(
            baselines_us={"eager": 100.0}, baseline_failures={"inductor": "no worker"}
        )
        return Choice(region, candidate, entry, "test")

    def compile_fx(
        gm: torch.fx.GraphModule, inputs: Sequence[Any], config_patches: Any = None
    ) -> Any:
        telemetry.count("compiled")
        return gm.forward

    monkeypatch.setattr("torch_cudal1.search.tune.choose", choose)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return Settings(cache_dir=tmp_path)


def answers(net: nn.Module, x: torch.Tensor, settings: Settings, **options: Any) -> dict[str, int]:
    """Run `net` in a process's first compilation; what was counted."""
    telemetry.reset()
    torch._dynamo.reset()
    options = {"cache_dir": settings.cache_dir, "strictness": "error", **options}
    assert torch.equal(torch.compile(net, backend=cudal1, options=options)(x), net(x))
    return dict(telemetry.report().counters)


@pytest.mark.parametrize(("speedup", "swapped", "compiled"), [(0.9, 0, 1), (1.1, 1, 0)])
def test_the_backend_measures_in_a_search_and_remembers(
    speedup: float,
    swapped: int,
    compiled: int,
    eager_decision: Settings,
    fix_speedup: Any,
    runs: Any,
) -> None:
    fix_speedup(speedup)
    net = nn.Linear(4, 4)
    with torch.no_grad():
        first = answers(net, X, eager_decision, on_miss="tune")
        assert (first["judge.in_place"], first["compiled"]) == (1, 1)
        ran = runs.inference
        again = answers(net, X, eager_decision, on_miss="tune")
    assert "judge.in_place" not in again
    assert (runs.inference - ran, again.get("compiled", 0)) == (swapped, compiled)


def test_outside_a_search_the_backend_compiles_nothing_to_compare(
    eager_decision: Settings, fix_speedup: Any, runs: Any
) -> None:
    fix_speedup(0.5)
    with torch.no_grad():
        result = answers(nn.Linear(4, 4), X, eager_decision)
    assert "judge.in_place" not in result
    assert (runs.inference, result.get("compiled", 0)) == (1, 0)


# --- a training step


def step_of(net: nn.Module, *inputs: torch.Tensor) -> list[Any]:
    """The flat inputs of a functional form of `net`: its parameters, its buffers, the inputs."""
    return [*net.parameters(), *net.buffers(), *inputs]


def functional(net: nn.Module) -> Callable[..., Any]:
    names = [name for name, _ in (*net.named_parameters(), *net.named_buffers())]

    def call(*flat: Any) -> Any:
        state = dict(zip(names, flat, strict=False))
        return (torch.func.functional_call(net, state, flat[len(names) :]),)

    return call


def train_once(net: nn.Module, inputs: list[Any]) -> GraphUnderTest:
    call = functional(net)
    return GraphUnderTest(inputs, CPU, lambda: call, is_pure=False, has_benchmark=False)


def test_a_step_on_trial_leaves_nothing_behind(fix_speedup: Any) -> None:
    fix_speedup(1.5)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    inputs, heard = step_of(net, torch.randn(8, 4, requires_grad=True)), []
    for leaf in inputs:
        if leaf.requires_grad:
            leaf.register_hook(heard.append)
    before = [leaf.detach().clone() for leaf in inputs]
    runs, call = choose_faster_step(train_once(net, inputs), functional(net), frozenset({4, 5, 6}))
    assert all(torch.equal(leaf, value) for leaf, value in zip(inputs, before, strict=True))
    assert all(leaf.grad is None for leaf in inputs)
    assert not heard
    call(*inputs)[0].sum().backward()
    assert runs == "ours"
    assert not torch.equal(
        inputs[4], before[4]
    )  # a call that is no trial moves the statistics, and is heard
    assert len(heard) == 5


def test_random_generators_are_as_before_a_step_on_trial(fix_speedup: Any) -> None:
    fix_speedup(1.5)
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    state = torch.get_rng_state()
    choose_faster_step(train_once(net, step_of(net, X)), functional(net), frozenset())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("speedup", "floor", "runs"),
    [(1.01, 1.02, "inductor"), (1.1, 1.02, "ours"), (1.01, 1.0, "ours")],
)
def test_eager_needs_more_than_noise_and_ours_does_not(
    speedup: float, floor: float, runs: str, fix_speedup: Any
) -> None:
    fix_speedup(speedup)
    net = nn.Linear(4, 4)
    assert (
        choose_faster_step(
            train_once(net, step_of(net, X)), functional(net), frozenset(), min_speedup=floor
        )[0]
        == runs
    )


class Marked(torch.Tensor):
    """A tensor subclass, which may do anything."""


def fails(*_: Any) -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("choice_given", "call", "reason"),
    [
        (torch.randn(2, 4).as_subclass(Marked), None, "got Marked"),
        (X, fails, "RuntimeError: out of memory"),
    ],
)
def test_where_no_step_can_be_made_inductor_runs_and_the_reason_is_told(
    choice_given: Any, call: Any, reason: str
) -> None:
    net = nn.Linear(4, 4)
    assert (
        choose_faster_step(
            train_once(net, step_of(net, choice_given)), call or functional(net), frozenset()
        )[0]
        == "inductor"
    )
    (event,) = telemetry.report().events
    assert reason in event.facts["reason"]


def test_a_step_that_takes_the_budget_alone_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(end_to_end, "_BUDGET_S", 0.0)
    net = nn.Linear(4, 4)
    assert (
        choose_faster_step(train_once(net, step_of(net, X)), functional(net), frozenset())[0]
        == "inductor"
    )
    (event,) = telemetry.report().events
    assert "one step takes more than" in event.facts["reason"]


@pytest.fixture
def no_benchmark(eager_decision: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Nothing of ours was found for any graph, and no baseline was benchmarked: Inductor it is."""

    def choose(region: Any, place: Any, **_: Any) -> Choice:
        candidate = Candidate(region.program, "inductor", "baseline")
        entry = entry_for(region, candidate, place.settings)
        entry.evidence.update(baselines_us={})
        return Choice(region, candidate, entry, "test")

    monkeypatch.setattr("torch_cudal1.search.tune.choose", choose)
    return eager_decision


@pytest.mark.parametrize(("speedup", "compiled"), [(1.5, None), (1.01, 1)])
def test_eager_takes_a_training_graph_that_it_runs_faster_also_in_the_next_process(
    speedup: float, compiled: int | None, no_benchmark: Settings, fix_speedup: Any
) -> None:
    called = fix_speedup(speedup)
    net, x = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)), torch.randn(3, 2, 4)
    first = answers(net, x, no_benchmark, on_miss="tune")
    assert (first["judge.in_place"], first["compiled"]) == (1, 1)
    assert [len(gradients) for gradients in called] == [4, 4]
    again = answers(net, x, no_benchmark)
    assert (again.get("judge.in_place"), again.get("compiled"), again["graphs_remembered"]) == (
        None,
        compiled,
        1,
    )


def test_graphs_that_pytorch_would_record_are_not_called_on_copies(
    no_benchmark: Settings, fix_speedup: Any
) -> None:
    called = fix_speedup(1.5)
    net = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
    answers(net, torch.randn(3, 2, 4), no_benchmark, on_miss="tune", **{"triton.cudagraphs": True})
    assert not called


@pytest.mark.usefixtures("no_benchmark")
def test_a_backward_that_is_compiled_late_may_be_compiled_on_trial(
    eager_decision: Settings, fix_speedup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with PyTorch's caches off; inside a frame's compilation its counters are set already."""

    def late(gm: torch.fx.GraphModule, inputs: Sequence[Any], config_patches: Any = None) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))(gm, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", late)
    called = fix_speedup(1.0)
    net = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
    assert answers(net, torch.randn(3, 2, 4), eager_decision, on_miss="tune")["judge.in_place"] == 1
    assert [len(gradients) for gradients in called] == [4, 4]


DISTURBED, ONE_SIDED = (0.85, 0.94, 1.31), (1.33, 1.73, 1.98)


# what is measured one time after the other, whether steady; how many of them are made, the last one
# counting
MEASURED = [
    ([(DISTURBED, False), (CLEAR_GAIN, True)], 2),
    ([(DISTURBED, True)], 1),  # a small difference, well measured
    ([(ONE_SIDED, False)], 1),
    ([(DISTURBED, False)] * 3 + [(CLEAR_GAIN, True)], 3),
]


@pytest.mark.parametrize(("results", "measurements"), MEASURED)
def test_a_disturbed_measurement_is_made_again(
    results: list[tuple[tuple[float, float, float], bool]],
    measurements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = [make_summary(*numbers, steady=steady) for numbers, steady in results]
    monkeypatch.setattr(end_to_end, "sample_pairs", lambda *_, **__: [])
    monkeypatch.setattr(end_to_end, "summarise", lambda _: waiting.pop(0))
    result = end_to_end.end_to_end_benchmark(lambda: None, lambda: None, CPU, margin=1.0)
    assert (result.low, result.speedup, result.high) == results[measurements - 1][0]
    assert len(waiting) == len(results) - measurements
