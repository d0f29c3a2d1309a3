"""Graphs go to Inductor with the user's options, and with the index checks that eager makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx

from torch_cudal1.api.inductor import compile_fx_graph, compile_with_inductor, run_graph

X = torch.randn(3, 4)


class Compiler:
    """In place of Inductor: notes what it is given, and calls the graph's own operators."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.options: dict[str, Any] | None = None
        self.donated_buffer = False

    def __call__(
        self, gm: Any, inputs: Sequence[Any], config_patches: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        self.graph, self.options = gm, config_patches
        self.donated_buffer = functorch_config.donated_buffer
        return gm.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(compile_fx, "compile_fx", compiler)
    return compiler


def record_graph(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """Dynamo's graph of `function`."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    torch._dynamo.reset()
    (gm,) = graphs
    return gm


@pytest.mark.parametrize("options", [{}, {"max_autotune": True}])
def test_the_users_options_reach_inductor_and_no_others(
    options: dict[str, Any], compiler: Compiler
) -> None:
    gm = record_graph(torch.relu, X)
    compiled = compile_fx_graph(gm, [X], options, repeatable_backward=False)
    assert compiler.graph is gm
    assert compiler.options == (options or None)
    assert torch.equal(compiled(X)[0], X.relu())


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_backward_that_may_run_twice_gives_no_buffer_away(
    repeatable: bool, compiler: Compiler
) -> None:
    before = functorch_config.donated_buffer
    compile_fx_graph(record_graph(torch.relu, X), [X], {}, repeatable_backward=repeatable)
    assert compiler.donated_buffer is (before and not repeatable)
    assert functorch_config.donated_buffer is before


def test_a_graph_without_indices_is_compiled_without_checks(compiler: Compiler) -> None:
    compile_with_inductor(record_graph(torch.relu, X), [X], {}, repeatable_backward=False)
    assert compiler.options is None


def test_checks_are_added_for_indices_and_the_users_options_win(compiler: Compiler) -> None:
    index = torch.tensor([0, 2])
    gm = record_graph(lambda x, index: x[index], X, index)
    compile_with_inductor(gm, [X, index], {}, repeatable_backward=False)
    assert compiler.options
    name = next(iter(compiler.options))
    compile_with_inductor(gm, [X, index], {name: "users"}, repeatable_backward=False)
    assert compiler.options[name] == "users"


def test_an_index_out_of_range_raises_eagers_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_cudal1.runtime.index_checks import IndexOutOfRangeError

    index = torch.tensor([0, 2])
    gm = record_graph(lambda x, index: x[index], X, index)

    def fail(gm: Any, inputs: Any, config_patches: Any = None) -> Callable[..., Any]:
        def run(*_: Any) -> Any:
            raise IndexOutOfRangeError("checked")

        return run

    monkeypatch.setattr(compile_fx, "compile_fx", fail)
    compiled = compile_with_inductor(gm, [X, index], {}, repeatable_backward=False)
    with pytest.raises(IndexError, match="index 9 is out of bounds") as caught:
        compiled(X, torch.tensor([9, 0]))
    assert type(caught.value) is IndexError


def test_what_a_graphs_own_operators_raise_is_not_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    gm = record_graph(lambda x, y: x @ y, X, X.t())
    assert torch.equal(run_graph(gm, X, X.t())[0], X @ X.t())
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        run_graph(gm, X, X)
    assert capfd.readouterr().err == ""
