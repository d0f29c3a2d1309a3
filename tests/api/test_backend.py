"""`torch.compile(model, backend=cudal1)`: swaps planted for Dynamo's graphs really run, and what is
not served is Inductor's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

import torch_cudal1
from tests.entries import add_one_to_output, plant_compiled
from torch_cudal1.api.backend import cudal1
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, SettingError

pytestmark = pytest.mark.usefixtures("dynamo")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Inductor:
    """Stands in for Inductor: remembers the options it was given and runs the graph as it is, in no
    time.
    """

    def __init__(self) -> None:
        self.patches: list[dict[str, Any]] = []

    def __call__(
        self, gm: torch.fx.GraphModule, inputs: Sequence[Any], config_patches: Any = None
    ) -> Callable[..., Any]:
        self.patches.append(dict(config_patches or {}))
        return gm.forward


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Inductor:
    double = Inductor()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", double)
    return double


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 8)


def ours(target: Any, tmp_path: Path, **kwargs: Any) -> Any:
    """`target` compiled by us, failing loudly."""
    options = {"cache_dir": tmp_path, "strictness": "error", **kwargs.pop("options", {})}
    return torch.compile(target, backend=cudal1, options=options, **kwargs)


def step(
    module: nn.Module, x: torch.Tensor, call: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Output and gradients of one training step."""
    module.zero_grad()
    out = (module if call is None else call)(x)
    out.square().mean().backward()
    return out.detach(), {
        name: parameter.grad.clone() for name, parameter in module.named_parameters()
    }


# --- what is served


def test_inference_runs_the_swap_and_equals_eager(x, runs, inductor, tmp_path):
    net = Net()
    with torch.no_grad():
        plant_compiled(lambda f: f(x), net, tmp_path)
        assert torch.equal(ours(net, tmp_path)(x), net(x))
    assert (runs.inference, inductor.patches) == (1, [])


def test_a_swap_that_computes_something_else_would_be_seen(x, tmp_path):
    net = Net()
    with torch.no_grad():
        plant_compiled(lambda f: f(x), net, tmp_path, change=add_one_to_output)
        assert torch.equal(ours(net, tmp_path)(x), net(x) + 1)


def test_training_runs_both_swaps_and_gives_eager_s_gradients(x, runs, inductor, tmp_path):
    net = Net()
    plant_compiled(lambda f: step(net, x, f), net, tmp_path)
    torch.testing.assert_close(step(net, x, ours(net, tmp_path)), step(net, x))
    assert (runs.forward, runs.backward, inductor.patches) == (1, 1, [])


def test_ten_training_steps_with_batch_norm_and_dropout_end_where_eager_ends(x, runs, tmp_path):
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))
    twin = copy.deepcopy(net)
    scratch = copy.deepcopy(net)
    plant_compiled(lambda f: step(scratch, x, f), scratch, tmp_path)
    for module, call in ((net, ours(net, tmp_path)), (twin, None)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(10):
            step(module, torch.randn(5, 8), call)
            optimizer.step()
    torch.testing.assert_close(net.state_dict(), twin.state_dict())
    assert (runs.forward, runs.backward) == (10, 10)


@pytest.fixture
def no_compiler(monkeypatch, tmp_path) -> Iterator[None]:
    """Inductor's folder is empty, and nothing that it would compile with is there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "no-compiler"))}):
        yield


def test_where_inductor_has_no_compiler_eager_runs_and_the_reason_is_told(x, no_compiler, tmp_path):
    net = Net()
    served = torch.compile(
        net, backend=cudal1, options={"cache_dir": tmp_path, "on_miss": "baseline"}
    )
    with torch.no_grad():
        assert torch.equal(served(x), net(x))
    (fallback,) = [event for event in telemetry.report().events if event.what == "fallback"]
    assert fallback.stage == "inductor"
    assert "no-compiler" in str(fallback.facts["reason"])
    torch.testing.assert_close(step(net, x, served), step(net, x))


def test_where_inductor_cannot_compile_our_own_graph_the_user_gets_its_result_for_theirs(
    x, inductor, monkeypatch, tmp_path
):
    def refuse(*_: Any, **__: Any) -> None:
        raise InductorError(RuntimeError("not this one"), None)

    net = Net()
    with torch.no_grad():
        plant_compiled(lambda f: f(x), net, tmp_path)
        monkeypatch.setattr("torch_cudal1.graph.swap.build_runner", refuse)
        served = torch.compile(
            net, backend=cudal1, options={"cache_dir": tmp_path, "on_miss": "baseline"}
        )
        assert torch.equal(served(x), net(x))
    assert [event.stage for event in telemetry.report().events if event.what == "fallback"] == [
        "backend"
    ]
    assert inductor.patches == [{}]


def test_strict_callers_get_inductor_s_failure(x, no_compiler, tmp_path):
    with pytest.raises(BackendCompilerFailed, match="no-compiler"), torch.no_grad():
        ours(Net(), tmp_path, options={"on_miss": "baseline"})(x)


def test_every_piece_between_graph_breaks_is_served(x, runs, tmp_path):
    net = Net()

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        torch._dynamo.graph_break()
        return torch.tanh(y) * 2

    with torch.no_grad():
        assert plant_compiled(lambda f: f(x), broken, tmp_path) == 2
        assert torch.equal(ours(broken, tmp_path)(x), broken(x))
    assert runs.inference == 2


def test_fullgraph_still_refuses_a_graph_break(x, tmp_path):
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        ours(broken, tmp_path, fullgraph=True)(x)


def test_two_modules_that_share_one_graph_compute_with_their_own_weights(x, runs, tmp_path):
    first, second = Net(), Net()
    call = lambda net, x: net.body(x)  # one frame, two modules
    with torch.no_grad():
        plant_compiled(lambda f: f(first, x), call, tmp_path)
        compiled = ours(call, tmp_path)
        assert torch.equal(compiled(first, x), first(x))
        assert torch.equal(compiled(second, x), second(x))
        first.body[0].weight = nn.Parameter(torch.ones(16, 8))
        second.body[0].weight.data.mul_(3)
        assert torch.equal(compiled(first, x), first(x))
        assert torch.equal(compiled(second, x), second(x))
    assert runs.inference == 4


def test_several_signatures_are_served_side_by_side(runs, tmp_path):
    net, double = Net(), Net().double()
    inputs = [
        (net, torch.randn(5, 8)),
        (net, torch.randn(2, 3, 8)),
        (double, torch.randn(5, 8, dtype=torch.float64)),
    ]
    for module, input in inputs:
        with torch.no_grad():
            plant_compiled(lambda f, input=input: f(input), module, tmp_path)
    compiled = {module: ours(module, tmp_path, dynamic=False) for module in (net, double)}
    with torch.no_grad():
        for module, input in inputs * 2:
            assert torch.equal(compiled[module](input), module(input))
    assert runs.inference == 6


def test_autocast_is_followed(x, runs, tmp_path):
    net = Net()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plant_compiled(lambda f: f(x), net, tmp_path)
        out = ours(net, tmp_path)(x)
        assert out.dtype is torch.bfloat16
        assert torch.equal(out, net(x))
    assert runs.inference == 1


def test_outputs_that_alias_inputs_stay_views_and_written_inputs_are_written(x, runs, tmp_path):
    def effects(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.add_(x)
        return x.t(), y * 2, None, 3

    with torch.no_grad():
        plant_compiled(lambda f: f(x, torch.zeros(5, 8)), effects, tmp_path)
        y = torch.zeros(5, 8)
        view, twice, none, three = ours(effects, tmp_path)(x, y)
    assert view.data_ptr() == x.data_ptr()
    assert torch.equal(y, x)
    assert (torch.equal(twice, x * 2), none, three) == (True, None, 3)
    assert runs.inference == 1


def test_disabled_force_eager_and_reset_are_respected(x, runs, tmp_path):
    net = Net()
    with torch.no_grad():
        plant_compiled(lambda f: f(x), net, tmp_path, change=add_one_to_output)
        compiled, expected = ours(net, tmp_path), net(x)
        assert torch.equal(compiled(x), expected + 1)
        with torch_cudal1.disabled():
            assert torch.equal(compiled(x), expected)
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(compiled(x), expected)
        torch._dynamo.reset()
        assert torch.equal(compiled(x), expected + 1)


# --- what is left to Inductor


def test_without_an_entry_inductor_gets_the_graph_and_the_miss_is_counted(
    x, runs, inductor, tmp_path
):
    net = Net()
    with torch.no_grad():
        assert torch.equal(ours(net, tmp_path)(x), net(x))
    assert (len(inductor.patches), runs.total) == (1, 0)
    assert telemetry.report().counters["resolve.miss"] == 1


def dynamic(net: nn.Module, tmp_path: Path) -> Iterator[tuple[Any, torch.Tensor]]:
    compiled = ours(net, tmp_path, dynamic=True)
    yield from ((compiled, torch.randn(rows, 8)) for rows in (5, 6))


def mark_graphs(net: nn.Module, tmp_path: Path) -> Iterator[tuple[Any, torch.Tensor]]:
    compiled = ours(net, tmp_path)
    for rows in (5, 6):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        yield compiled, x


def automatic(net: nn.Module, tmp_path: Path) -> Iterator[tuple[Any, torch.Tensor]]:
    compiled = ours(net, tmp_path)
    yield from ((compiled, torch.randn(rows, 8)) for rows in (5, 6, 7))


@pytest.mark.parametrize("calls", [dynamic, mark_graphs, automatic])
def test_dynamic_shapes_are_inductor_s_and_right(calls, inductor, tmp_path):
    net = Net()
    with torch.no_grad():
        for compiled, input in calls(net, tmp_path):
            torch.testing.assert_close(compiled(input), net(input))
    events = [event for event in telemetry.report().events if event.what == "left_out"]
    assert "dynamic shapes" in events[-1].facts["reason"]
    assert telemetry.report().counters.get("fallbacks", 0) == 0
    assert len(inductor.patches) == (2 if calls is automatic else 1)


def test_from_the_second_shape_on_the_graph_is_inductor_s(x, runs, inductor, tmp_path):
    net = Net()
    with torch.no_grad():
        plant_compiled(lambda f: f(x), net, tmp_path)
        compiled = ours(net, tmp_path)
        for input in (x, x, torch.randn(6, 8), torch.randn(7, 8), x):
            torch.testing.assert_close(compiled(input), net(input))
    assert (runs.inference, len(inductor.patches)) == (
        2,
        1,
    )  # Dynamo asks its newest graph first, and that one takes any shape


def test_a_number_that_changes_is_followed_without_a_fallback(x, tmp_path):
    scale = lambda x, factor: x * factor
    compiled = ours(scale, tmp_path)
    for factor in (2.0, 3.0, 4.5, 2, 7, 1e9):
        assert torch.equal(compiled(x, factor), x * factor)
    assert telemetry.report().counters.get("fallbacks", 0) == 0


def test_real_inductor_compiles_and_trains_what_is_not_served(x, tmp_path):
    net = Net()
    torch.testing.assert_close(step(net, x, ours(net, tmp_path)), step(net, x))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_a_mode_reaches_inductor_as_its_options(mode, x, inductor, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_CUDAL1_CACHE_DIR", str(tmp_path))
    with torch.no_grad():
        torch.compile(Net(), backend=cudal1, mode=mode)(x)
    assert inductor.patches == [torch._inductor.list_mode_options(mode)]
    assert inductor.patches[0]


def test_options_are_split_between_us_and_inductor(x, inductor, tmp_path):
    with torch.no_grad():
        ours(
            Net(),
            tmp_path,
            options={"epilogue_fusion": False, "triton.cudagraphs": False, "margin": 1.2},
        )(x)
    assert inductor.patches == [{"epilogue_fusion": False, "triton.cudagraphs": False}]


def test_options_reach_inductor_under_a_swap_too(x, inductor, tmp_path, monkeypatch):
    from tests.entries import PlantingBackend

    net, options = Net(), []
    with torch.no_grad():
        torch.compile(net, backend=PlantingBackend(tmp_path, schedule="inductor"))(x)
        torch._dynamo.reset()
        monkeypatch.setattr(
            "torch._inductor.compile_fx.compile_fx",
            lambda gm, inputs, config_patches: options.append(config_patches) or gm.forward,
        )
        assert torch.equal(ours(net, tmp_path, options={"epilogue_fusion": False})(x), net(x))
    assert options == [{"epilogue_fusion": False}]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"epilog_fusion": True}, "epilog_fusion"), ({"on_miss": "tunes"}, "on_miss")],
)
def test_an_unknown_option_is_refused_by_name(options, named, x, tmp_path):
    with pytest.raises(BackendCompilerFailed, match=named) as caught:
        ours(Net(), tmp_path, options=options)(x)
    assert isinstance(caught.value.inner_exception, SettingError)


def test_enabled_false_is_plain_inductor(x, inductor, runs, tmp_path):
    net = Net()
    with torch.no_grad():
        plant_compiled(lambda f: f(x), net, tmp_path)
        ours(net, tmp_path, options={"enabled": False})(x)
    assert (len(inductor.patches), runs.total) == (1, 0)


# --- what fails


def test_a_miss_under_on_miss_error_is_visible(x, tmp_path):
    with pytest.raises(BackendCompilerFailed, match="cudal1 warmup") as caught, torch.no_grad():
        ours(Net(), tmp_path, options={"on_miss": "error"})(x)
    assert isinstance(caught.value.inner_exception, CacheMissError)


def boom(*_: Any, **__: Any) -> Any:
    raise KeyError("ours")


@pytest.mark.parametrize(
    "place",
    [
        "torch_cudal1.search.tune.choose",
        "torch_cudal1.graph.swap.build_runner",
        "torch_cudal1.graph.capture._trace",
    ],
)
def test_a_failure_of_ours_ends_in_inductor_and_the_reason_is_told(
    place, x, inductor, monkeypatch, tmp_path
):
    net = Net()
    with torch.no_grad():
        plant_compiled(lambda f: f(x), net, tmp_path)
        monkeypatch.setattr(place, boom)
        assert torch.equal(ours(net, tmp_path, options={"strictness": "silent"})(x), net(x))
        assert len(inductor.patches) == 1
        (event,) = [event for event in telemetry.report().events if event.what == "fallback"]
        assert "KeyError: 'ours'" in event.facts["reason"]
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match="ours"):
            ours(net, tmp_path)(x)


def test_a_warning_is_logged_once(x, inductor, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("torch_cudal1.search.tune.choose", boom)
    for module in (Net(), nn.Linear(8, 8)):
        torch.compile(module, backend=cudal1, options={"cache_dir": tmp_path})(x)
    assert [
        record.message
        for record in caplog.records
        if record.name == "torch_cudal1" and record.levelname == "WARNING"
    ] == ["cudal1 runs the baseline: backend failed (KeyError: 'ours'); see cudal1.report()"]


def test_a_failure_at_run_time_ends_in_the_user_s_own_operators(x, monkeypatch, tmp_path):
    net = Net()
    with torch.no_grad():
        plant_compiled(lambda f: f(x), net, tmp_path)
        monkeypatch.setattr("torch_cudal1.graph.swap.build_runner", lambda *args, **kwargs: boom)
        compiled = ours(net, tmp_path, options={"strictness": "silent"})
        assert torch.equal(compiled(x), net(x))
        assert torch.equal(compiled(x), net(x))
    assert telemetry.report().counters["run.fallback"] == 1  # then the swap is out of use


def test_a_failure_of_inductor_itself_is_not_taken_for_ours(x, monkeypatch, tmp_path):
    tries: list[int] = []
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda *args, **kwargs: tries.append(1) or boom()
    )
    net = Net()
    assert torch.equal(ours(net, tmp_path, options={"strictness": "silent"})(x), net(x))
    assert [event.stage for event in telemetry.report().events if event.what == "fallback"] == [
        "inductor"
    ]
    assert len(tries) == 1
