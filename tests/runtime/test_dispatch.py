"""The quick way into a bound module serves exactly the calls that it was bound for; everything else
goes the slow way, or back.
"""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_cudal1
from tests.entries import Calls, accelerate_planted, add_one_to_output, plant
from tests.runtime.executors import in_threads
from torch_cudal1.core import native, telemetry
from torch_cudal1.graph.swap import Swapped
from torch_cudal1.runtime import dispatch

pytestmark = [
    pytest.mark.skipif(
        native.extension() is None, reason=f"no C++ extension: {native.status()[1]}"
    ),
    pytest.mark.usefixtures("inference"),
]


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def make(
    tmp_path: Path,
    forward: Callable[..., Any] = lambda m, x: torch.relu(m.linear(x)),
    args: Any = X,
    **kwargs: Any,
) -> Calls:
    """A module bound to a planted swap whose table already serves these arguments."""
    module = accelerate_planted(forward, args, tmp_path, **kwargs)
    call_args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    module(*call_args, **kwargs)
    return module


def count_served(module: nn.Module) -> int:
    return module._compiled_call_impl._table.served


def test_from_the_second_call_on_the_quick_way_serves(tmp_path):
    module = make(tmp_path)
    assert count_served(module) == 0
    for count in (1, 2, 3):
        assert torch.equal(module(X), module._call_impl(X))
        assert count_served(module) == count
    with torch.inference_mode():
        assert module(X).is_inference()


OUTPUTS: dict[str, Callable[..., Any]] = {
    "tensor": lambda m, x: m.linear(x),
    "tuple": lambda m, x: (m.linear(x), x + 1),
    "views of one another": lambda m, x: (lambda y: (y, y.t()))(m.linear(x)),
    "a weight": lambda m, x: (m.linear.weight, m.linear(x)),
    "dict with plain values": lambda m, x: {"y": m.linear(x), "n": 3, "none": None, "s": [x * 2]},
}


@pytest.mark.parametrize("form", OUTPUTS)
def test_results_have_the_form_of_the_module_s_own(form, tmp_path):
    module = make(tmp_path, OUTPUTS[form])
    result, expected = module(X), module._call_impl(X)
    assert count_served(module) == 1
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert type(result) is type(expected)


def test_nested_and_keyword_arguments_reach_their_places(tmp_path):
    def forward(
        module: Calls, x: torch.Tensor, more: Any, *, scale: float, bias: torch.Tensor
    ) -> torch.Tensor:
        return module.linear(x) * scale - bias + more["a"][1] * 2

    args, kwargs = (X, {"a": [X + 1, X + 2]}), {"scale": 0.5, "bias": X + 3}
    module = make(tmp_path, forward, args, **kwargs)
    other = (X * 2, {"a": [X, X + 7]})
    assert torch.equal(module(*other, **kwargs), module._call_impl(*other, **kwargs))
    assert count_served(module) == 1


ALIASED: dict[str, Callable[..., Any]] = {
    "an input": lambda m, x: (x, m.linear(x)),
    "a view of an input": lambda m, x: (x.t(), m.linear(x)),
    "a view of a weight": lambda m, x: (m.linear.weight.t(), m.linear(x)),
    "a write": lambda m, x: m.count.add_(1) + x,
}


@pytest.mark.parametrize("form", ALIASED)
def test_what_needs_autograd_s_wrapper_never_takes_the_quick_way(form, tmp_path):
    module = make(tmp_path, ALIASED[form])
    module(X)
    module(X)
    assert count_served(module) == 0


# --- attacks: what changed must be seen


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def switch_for_a_while(
    read_switch: Callable[[], Any], write_switch: Callable[[Any], Any], value: Any
) -> Any:
    before = read_switch()
    write_switch(value)
    try:
        yield
    finally:
        write_switch(before)


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "the kill switch": torch_cudal1.disabled,
    "a function mode": Functions,
    "a dispatch mode": Dispatch,
    "a default device": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "gradients": torch.enable_grad,
    "determinism": lambda: switch_for_a_while(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "the default dtype": lambda: switch_for_a_while(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "matmul precision": lambda: switch_for_a_while(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "forward-mode differentiation": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_global_switch_that_changed_is_a_miss(name, tmp_path):
    module = make(tmp_path)
    module(X)
    before = count_served(module)
    with SWITCHES[name]():
        expected = module._call_impl(X)
        assert torch.equal(module(X), expected)
        assert count_served(module) == before
    if (
        name != "matmul precision"
    ):  # setting it back leaves PyTorch in another state than before it was ever set
        module(X)
        module(X)
        assert count_served(module) > before


def test_transforms_and_tracers_see_the_module_itself(tmp_path):
    module = make(tmp_path)
    module(X)
    before = count_served(module)
    torch.testing.assert_close(torch.vmap(module)(X[None]), module._call_impl(X)[None])
    traced = torch.jit.trace(module, X, check_trace=False)
    torch.testing.assert_close(traced(X), module._call_impl(X))
    assert "relu" in str(traced.inlined_graph)
    exported = torch.export.export(module, (X,))
    assert any("relu" in str(node.target) for node in exported.graph.nodes)
    assert count_served(module) == before


def test_an_outer_compile_sees_the_module_s_operators(tmp_path):
    module, graph_texts = make(tmp_path), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graph_texts.append(str(graph.code))
        return graph.forward

    torch._dynamo.reset()
    outer = torch.compile(lambda x: module(x) + 1, backend=backend, fullgraph=True)
    torch.testing.assert_close(outer(X), module._call_impl(X) + 1)
    assert len(graph_texts) == 1
    assert "relu" in graph_texts[0]
    torch._dynamo.reset()


ARGUMENTS: dict[str, Callable[[], torch.Tensor]] = {
    "shape": lambda: torch.randn(4, 8),
    "strides": lambda: torch.randn(8, 3).t(),
    "alignment": lambda: torch.randn(25)[1:].view(3, 8),
    "gradient wanted": lambda: torch.randn(3, 8).requires_grad_(),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_another_kind_are_a_miss(name, tmp_path):
    module, other = make(tmp_path), ARGUMENTS[name]()
    assert torch.equal(module(other), module._call_impl(other))
    assert count_served(module) == 0


def _patch(module: Calls) -> None:
    module.linear.forward = lambda x: x * 0  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Calls], Any]] = {
    "a parameter": lambda m: setattr(
        m.linear, "weight", nn.Parameter(torch.zeros(8, 8), requires_grad=False)
    ),
    "a parameter's dtype": lambda m: m.double(),
    "a submodule": lambda m: setattr(m, "linear", nn.Linear(8, 8, bias=False)),
    "a hook": lambda m: m.linear.register_forward_hook(lambda module, args, out: out + 1),
    "a patched forward": _patch,
    "an attribute": lambda m: setattr(m, "make", lambda module, x: x * 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_changed_is_a_miss(name, tmp_path):
    module = make(tmp_path)
    module(X)
    before = count_served(module)
    CHANGES[name](module)
    x = X.double() if name.endswith("dtype") else X
    assert torch.equal(module(x), module._call_impl(x))
    assert count_served(module) == before


def test_weights_are_read_live(tmp_path):
    module = make(tmp_path)
    for _ in range(3):
        module.linear.weight.mul_(-1.5)
        assert torch.equal(module(X), module._call_impl(X))
    module.linear.weight.data = torch.randn(8, 8)
    assert torch.equal(module(X), module._call_impl(X))
    assert count_served(module) == 4


# --- failures


class Refuses:
    """A runner that fails once its switch is set."""

    fails = False

    def __init__(self, runner: Any) -> None:
        self.runner, self.calls = runner, 0

    def __call__(self, inputs: Any) -> Any:
        self.calls += 1
        if self.fails:
            raise RuntimeError("the device is tired")
        return self.runner(inputs)


def failing(module: Calls, monkeypatch: pytest.MonkeyPatch) -> Refuses:
    """Put a `Refuses` in the place of the runner."""
    (bound,) = module._compiled_call_impl.bindings.values()
    swapped: Swapped = bound.direct.runner.__closure__[0].cell_contents
    runner = swapped._runner = Refuses(swapped._runner)
    swapped._strictness = "silent"
    module._compiled_call_impl._table.clear()
    module(X)
    return runner


def test_a_runner_that_fails_is_quarantined_and_the_module_s_own_operators_answer(
    tmp_path, monkeypatch
):
    module = make(tmp_path)
    runner = failing(module, monkeypatch)
    module(X)
    assert count_served(module) == 1
    runner.fails = True
    for _ in range(3):
        assert torch.equal(module(X), module._call_impl(X))
    assert count_served(module) == 1
    assert (
        runner.calls == 4
    )  # the call that fills the table, the one served, one failing on either way, never again
    assert telemetry.report().counters["fallbacks"] == 1


def test_an_error_of_the_caller_s_is_the_caller_s_and_the_swap_goes_on(tmp_path):
    def forward(module: Calls, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.relu(module.linear(x)).index_select(0, index)

    good, bad = torch.tensor([0, 2]), torch.tensor([0, 99])
    module = make(tmp_path, forward, (X, good))
    module(X, good)
    with pytest.raises(IndexError) as eager_error:
        module._call_impl(X, bad)
    with pytest.raises(IndexError, match=str(eager_error.value)[:20]):
        module(X, bad)
    module(X, good)
    before = count_served(module)
    assert torch.equal(module(X, good), module._call_impl(X, good))
    assert count_served(module) == before + 1


def test_an_interrupt_is_not_swallowed(tmp_path, monkeypatch):
    module = make(tmp_path)
    runner = failing(module, monkeypatch)

    def interrupt(inputs: Any) -> Any:
        raise KeyboardInterrupt

    runner.runner = interrupt
    with pytest.raises(KeyboardInterrupt):
        module(X)


def test_a_table_refuses_what_it_cannot_hold():
    table = dispatch.make_dispatch_table(cuda=False)
    assert table is not None
    guard = native.extension().Guard(*[()] * 10)
    for bad in (
        (),
        (1, (), {}, guard, (), print),
        (1, [], {}, guard, (), print, None, None),
        (1, (), {}, 3, (), print, None, None),
        (1, (), {}, guard, (), print, None, 3),
    ):
        with pytest.raises(TypeError):
            table.add(*bad)
    with pytest.raises(ValueError, match="argument tensor 1 of 1"):
        table.add(1, (X,), {}, guard, (1,), print, None, None)
    with pytest.raises(TypeError):
        table.add(1, (X,), {}, guard, ("x",), print, None, None)
    with pytest.raises(TypeError):
        table((X,))
    assert table.add(1, (X,), {}, guard, (0,), lambda inputs: [inputs[0] + 1], None, None)
    assert not table.add(1, (X,), {}, guard, (0,), print, None, None)
    assert torch.equal(table((X,), {}), X + 1)
    table.clear()
    assert table((X,), {}) is dispatch.get_miss_sentinel()


# --- lifetimes


def test_restore_and_the_end_of_the_module_free_everything(tmp_path):
    module = make(tmp_path)
    module(X)
    torch_cudal1.restore(module)
    assert torch.equal(module(X), module._call_impl(X))
    weight = weakref.ref(module.linear.weight)
    again = make(tmp_path)
    again(X)
    weight_reference = weakref.ref(again.linear.weight)
    del module, again
    gc.collect()
    assert weight() is None
    assert weight_reference() is None


def test_what_is_bound_anew_replaces_what_was_bound(tmp_path):
    module = make(tmp_path)
    module(X)
    old = weakref.ref(module.linear.weight)
    module.linear.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    for _ in range(8):
        assert torch.equal(module(X), module._call_impl(X))
    gc.collect()
    assert old() is None
    before = count_served(module)
    module(X)
    assert count_served(module) == before + 1


def test_ten_thousand_calls_leak_nothing(tmp_path):
    module = make(tmp_path, OUTPUTS["tuple"])
    for _ in range(300):
        module(X)
    gc.collect()
    objects, peak = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        module(X)
        module(X[:2])
    gc.collect()
    assert len(gc.get_objects()) - objects < 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8_000


def test_threads_share_one_table(tmp_path):
    module, wrong = make(tmp_path), []
    expected = module._call_impl(X)

    def work() -> None:
        with torch.no_grad():
            for _ in range(300):
                if not torch.equal(module(X), expected):
                    wrong.append(1)

    in_threads(work)
    assert not wrong
    assert count_served(module) == 1200


def test_it_is_the_swap_that_runs(tmp_path):
    module = Calls(lambda m, x: torch.relu(m.linear(x)))
    plant(module, X, tmp_path, change=add_one_to_output)
    torch_cudal1.accelerate(module, X, cache_dir=tmp_path, strictness="error")
    module(X)
    assert torch.equal(module(X), module._call_impl(X) + 1)
    assert count_served(module) == 1


def test_without_the_extension_there_is_no_table(monkeypatch):
    monkeypatch.setattr(dispatch.native, "extension", lambda: None)
    assert dispatch.make_dispatch_table(cuda=False) is None
    assert dispatch.get_miss_sentinel() is None
    with nullcontext():
        module = nn.Linear(2, 2)
    torch_cudal1.accelerate(module, enabled=True)
    assert module(torch.ones(1, 2)).shape == (1, 2)
