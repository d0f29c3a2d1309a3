"""An accelerated module is still the user's module: identity, hooks, copies, tracers, switches. A
planted swap really runs.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torch_cudal1
from tests.entries import add_one_to_output, plant
from torch_cudal1.api.dispatcher import Dispatcher
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, SettingError

pytestmark = pytest.mark.usefixtures("inference")


class Net(nn.Module):
    """Two layers, a buffer, a constant: enough for everything that may be replaced, patched or
    copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4)
        self.register_buffer("offset", torch.full((4,), 0.5))
        self.slope = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.leaky_relu(self.first(x), self.slope)) + self.offset


@pytest.fixture
def net(tmp_path: Path, x: torch.Tensor) -> Net:
    """An accelerated Net whose swap is bound for `x`."""
    module = Net()
    plant(module, x, tmp_path)
    return torch_cudal1.accelerate(module, x, cache_dir=tmp_path, strictness="error")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 8)


def own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the module computes by itself."""
    return module._call_impl(*args, **kwargs)


# --- identity


def test_the_swapped_program_runs_and_gives_the_module_s_own_result(net, x, runs):
    assert torch.equal(net(x), own(net, x))
    assert runs.inference == 1


def test_a_swap_that_computes_something_else_would_be_seen(x, tmp_path):
    module = Net()
    plant(module, x, tmp_path, change=add_one_to_output)
    torch_cudal1.accelerate(module, x, cache_dir=tmp_path)
    assert torch.allclose(
        module(x), own(module, x) + 1
    )  # so the equalities of this file mean something


def test_type_repr_keys_and_parameters_stay(net):
    plain = Net()
    assert type(net) is Net
    assert repr(net) == repr(plain)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in net.named_modules()] == [name for name, _ in plain.named_modules()]


def test_restore_gives_the_module_back_as_it_was(net, x, runs):
    assert torch_cudal1.restore(net) is net
    assert net._compiled_call_impl is None
    net(x)
    assert runs.total == 0


def test_accelerating_twice_keeps_one_dispatcher(net, x, tmp_path, runs):
    torch_cudal1.accelerate(net, x, cache_dir=tmp_path)
    assert not isinstance(net._compiled_call_impl.replaced, Dispatcher)
    net(x)
    assert runs.total == 1


def test_a_compiled_module_is_compiled_again_after_restore(x, tmp_path):
    module = Net()
    module.compile(backend="eager")
    compiled = module._compiled_call_impl
    torch_cudal1.accelerate(module, x, cache_dir=tmp_path)
    assert torch.equal(module(x), own(module, x))
    assert torch_cudal1.restore(module)._compiled_call_impl is compiled


def test_only_modules_are_accepted():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        torch_cudal1.accelerate(lambda x: x)


def test_an_unknown_option_is_refused_by_name_and_the_module_stays_plain(x):
    module = Net()
    with pytest.raises(SettingError, match="on_mis"):
        torch_cudal1.accelerate(module, x, on_mis="tune")
    assert module._compiled_call_impl is None


def test_a_miss_under_on_miss_error_is_raised_and_the_module_stays_plain(x, tmp_path):
    module = Net()
    with pytest.raises(CacheMissError, match="warmup"):
        torch_cudal1.accelerate(module, x, cache_dir=tmp_path, on_miss="error")
    assert module._compiled_call_impl is None


def test_under_on_miss_error_an_unseen_signature_is_an_error_at_its_first_call(net, x, tmp_path):
    torch_cudal1.accelerate(net, x, cache_dir=tmp_path, on_miss="error")
    net(x)
    with pytest.raises(CacheMissError):
        net(torch.randn(5, 8))


def test_a_module_without_the_switch_on_is_left_alone(x, tmp_path, monkeypatch):
    assert (
        torch_cudal1.accelerate(Net(), x, cache_dir=tmp_path, enabled=False)._compiled_call_impl
        is None
    )
    monkeypatch.setenv("TORCH_CUDAL1_ENABLED", "0")
    assert torch_cudal1.accelerate(Net(), x, cache_dir=tmp_path)._compiled_call_impl is None


def test_disabled_runs_the_module_s_own_forward_and_ends(net, x, runs):
    with torch_cudal1.disabled(), torch_cudal1.disabled():
        net(x)
    assert runs.total == 0
    net(x)
    assert runs.total == 1


def test_explain_says_what_runs(net):
    explanation = torch_cudal1.explain(net)
    assert [region.runs for region in explanation.regions] == ["planted -> eager"]
    with pytest.raises(TypeError, match="not accelerated"):
        torch_cudal1.explain(Net())


def test_the_example_inputs_are_not_kept_alive(tmp_path):
    x = torch.randn(3, 8)
    reference, module = weakref.ref(x), Net()
    plant(module, x, tmp_path)
    torch_cudal1.accelerate(module, x, cache_dir=tmp_path)
    del x
    gc.collect()
    assert reference() is None


# --- hooks, modes, changes


@pytest.mark.parametrize("where", ["net", "first"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_registered_later_fires_and_its_removal_brings_the_swap_back(
    net, x, runs, where, kind
):
    fired: list[int] = []
    handle = getattr(net if where == "net" else net.first, kind)(lambda *_: fired.append(1))
    for _ in range(3):
        net(x)
    assert (len(fired), runs.total) == (3, 0)
    explanation = torch_cudal1.explain(net)
    assert "hooks were registered" in explanation.left_out[0]
    assert explanation.untouched
    handle.remove()
    net(x)
    assert (len(fired), runs.total) == (3, 1)
    assert not torch_cudal1.explain(net).left_out


def test_a_global_hook_fires(net, x, runs):
    fired: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: fired.append(type(module).__name__)
    )
    net(x)
    handle.remove()
    assert (fired, runs.total) == (["Linear", "Linear", "Net"], 0)


def test_train_and_eval_are_followed(x, tmp_path, runs):
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    plant(module, x, tmp_path)
    torch_cudal1.accelerate(module, x, cache_dir=tmp_path)
    module.train()
    assert (module(x) == 0).any()
    module.eval()
    assert torch.equal(module(x), own(module, x))
    assert runs.total == 1


CHANGES = {
    "replaced child": lambda net: setattr(net, "first", nn.Linear(8, 8)),
    "child without bias": lambda net: setattr(net, "first", nn.Linear(8, 8, bias=False)),
    "identity instead of a child": lambda net: setattr(net, "first", nn.Identity()),
    "patched forward of a child": lambda net: setattr(net.first, "forward", lambda x: x * 2),
    "patched forward": lambda net: setattr(net, "forward", lambda x: x * 2),
    "another attribute": lambda net: setattr(net, "slope", 0.9),
    "new buffer": lambda net: setattr(net, "offset", torch.zeros(4)),
    "another class": lambda net: setattr(
        net, "__class__", type("Net2", (Net,), {"forward": lambda self, x: x + 1})
    ),
    "parametrized weight": lambda net: nn.utils.parametrizations.weight_norm(net.first),
    "no gradient wanted": lambda net: net.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_module_takes_effect_at_the_next_call_and_ever_after(net, x, change):
    CHANGES[change](net)
    for _ in range(4):
        assert torch.equal(net(x), own(net, x))


def test_a_deleted_child_fails_as_it_would_without_us(net, x):
    del net.first
    with pytest.raises(AttributeError, match="first"):
        net(x)


def test_a_change_that_lasts_is_bound_again(net, x, runs):
    net.first = nn.Linear(8, 8)
    for _ in range(3):
        assert torch.equal(net(x), own(net, x))
    assert (
        runs.total == 2
    )  # the first call runs the module's own forward, the second finds the change has lasted


def test_a_module_that_changes_at_every_call_is_never_compiled_again(net, x):
    for step in range(20):
        net.slope = step / 100
        assert torch.equal(net(x), own(net, x))
    assert telemetry.report().counters.get("swap.rebound", 0) == 0


def test_a_change_that_does_not_last_costs_no_binding(net, x, runs):
    replaced = {name: value * 2 for name, value in net.named_parameters()}
    expected = torch.func.functional_call(copy.deepcopy(net), replaced, x)
    for _ in range(3):
        assert torch.equal(
            torch.func.functional_call(net, {k: v.clone() for k, v in replaced.items()}, x),
            expected,
        )
        net(x)
    assert runs.total == 3
    assert telemetry.report().counters.get("swap.rebound", 0) == 0


# --- copies and files


@pytest.mark.parametrize(
    "make", [Net, lambda: nn.LSTM(8, 8), lambda: nn.GRU(8, 4)], ids=["Net", "LSTM", "GRU"]
)
def test_a_deep_copy_is_plain_and_independent(make, x, tmp_path, runs):
    module = make()
    plant(module, x, tmp_path)
    torch_cudal1.accelerate(module, x, cache_dir=tmp_path, strictness="error")
    module(x)
    twin = copy.deepcopy(module)
    assert twin._compiled_call_impl is None
    next(twin.parameters()).zero_()
    assert next(module.parameters()).abs().sum() > 0
    before = runs.total
    torch.testing.assert_close(module(x), own(module, x), rtol=0, atol=0)
    assert runs.total == before + 1 > 1


@pytest.mark.parametrize("module", [Net(), nn.LSTM(8, 8)], ids=["Net", "LSTM"])
def test_pickle_and_torch_save_hold_a_plain_module(module, x, tmp_path):
    plant(module, x, tmp_path)
    torch_cudal1.accelerate(module, x, cache_dir=tmp_path, strictness="error")
    text = pickle.dumps(module)
    assert b"torch_cudal1" not in text
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for loaded in (pickle.loads(text), torch.load(file, weights_only=False)):  # noqa: S301  our own bytes
        assert loaded._compiled_call_impl is None
        torch.testing.assert_close(loaded(x), module(x), rtol=0, atol=0)


# --- tracers


def test_export_sees_the_original(net, x, runs):
    for strict in (True, False):
        program = torch.export.export(net, (x,), strict=strict)
        assert set(program.state_dict) == set(net.state_dict())
        assert torch.equal(program.module()(x), own(net, x))
    assert runs.total == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_make_fx_symbolic_trace_and_jit_trace_see_the_original(net, x, runs):
    graph = make_fx(net)(x)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"].count(
        torch.ops.aten.addmm.default
    ) == 2
    assert torch.equal(torch.jit.trace(net, (x,), check_trace=False)(x), own(net, x))
    assert torch.equal(torch.fx.symbolic_trace(net)(x), own(net, x))
    assert runs.total == 0


def test_an_outer_torch_compile_sees_the_original(net, x, runs):
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    assert torch.equal(torch.compile(net, backend=backend, fullgraph=True)(x), own(net, x))
    assert (len(graphs), runs.total) == (1, 0)
    assert torch.nn.functional.leaky_relu in graphs[0]


def test_functorch_transforms_see_the_original(net, x, runs):
    grad = torch.func.grad(
        lambda weight: torch.func.functional_call(net, {"second.weight": weight}, x).sum()
    )
    with torch.enable_grad():
        assert grad(net.second.weight).shape == (4, 8)
    assert torch.equal(
        torch.vmap(net)(x[:, None])[:, 0].round(decimals=4), own(net, x).round(decimals=4)
    )
    assert runs.total == 0


def test_an_accelerated_child_inside_an_accelerated_parent(net, x, tmp_path, runs):
    parent = nn.Sequential(net, nn.Tanh())
    plant(parent, x, tmp_path)
    torch_cudal1.accelerate(parent, x, cache_dir=tmp_path, strictness="error")
    assert torch.equal(parent(x), torch.tanh(own(net, x)))
    assert runs.total == 1  # one Program for both
