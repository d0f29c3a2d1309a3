"""Code that Inductor compiled for a CPU raises for an index that eager refuses, and checks none that
is in range by construction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.runtime import index_checks
from torch_cudal1.runtime.index_checks import (
    IndexOutOfRangeError,
    ZeroDivisorError,
    add_class_checks,
    cpu_index_checks,
    find_lost_check,
    has_indices,
    raise_as_eager,
)

X = torch.arange(24.0).reshape(4, 6)
INDEX = torch.tensor([0, 3])
OPERATOR = "cudal1.checked_index.default"


def insert_checks(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """The ATen graph of `function` after the pass that Inductor runs."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    cpu_index_checks()["post_grad_custom_pre_pass"](module.graph)
    module.recompile()
    return module


def list_bounds(module: fx.GraphModule) -> list[tuple[int, int]]:
    """Of each check in the graph, from which index to which size."""
    return [node.args[1:] for node in module.graph.nodes if str(node.target) == OPERATOR]


def call(target: str, *args: Any) -> Callable[..., torch.Tensor]:
    """`aten.target` of a table and an index, with `args` between or behind them."""
    packet, _, overload = target.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    return lambda x, index: operator(*(arg(x, index) if callable(arg) else arg for arg in args))


def table(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x


def index_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return index


CHECKED: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, int]]]] = {
    "embedding": (call("embedding.default", table, index_of), [(0, 4)]),
    "rows": (call("index_select.default", table, 0, index_of), [(0, 4)]),
    "columns, from the end": (call("index_select.default", table, -1, index_of), [(0, 6)]),
    "gather": (lambda x, index: torch.gather(x, 1, index[:, None]), [(0, 6)]),
    "a list of indices": (lambda x, index: x[index, index], [(-4, 4), (-6, 6)]),
    "a list with a gap": (lambda x, index: x[:, index], [(-6, 6)]),
    "an index behind a mask of two dimensions": (
        lambda x, index: x.reshape(4, 3, 2)[torch.ones(4, 3, dtype=torch.bool), index[:1]],
        [(-2, 2)],
    ),
    "a range that fits": (lambda x, index: x.index_select(0, torch.arange(4)), []),
    "views of a range that fits": (
        lambda x, index: torch.gather(x, 0, torch.arange(4).view(4, 1).expand(4, 6)),
        [],
    ),
    "a range that is too long": (lambda x, index: x.index_select(0, torch.arange(5)), [(0, 4)]),
    "a constant that fits": (
        lambda x, index: torch.gather(x, 1, torch.full((4, 1), 5)),
        [],
    ),
    "a constant that does not": (
        lambda x, index: torch.gather(x, 1, torch.full((4, 1), 6)),
        [(0, 6)],
    ),
    "a sum of a range": (lambda x, index: x.index_select(0, torch.arange(4) + 1), [(0, 4)]),
}


@pytest.mark.parametrize("case", CHECKED)
def test_an_index_is_checked_unless_it_is_in_range_by_construction(case: str) -> None:
    function, bounds = CHECKED[case]
    assert list_bounds(insert_checks(function, X, INDEX)) == bounds


def test_a_checked_graph_computes_the_same_and_raises_for_the_first_index_outside() -> None:
    module = insert_checks(lambda x, index: x.index_select(0, index), X, INDEX)
    assert torch.equal(module(X, INDEX), X[INDEX])
    assert module(X, INDEX[:0]).shape == (0, 6)
    for bad_index in (4, -1):
        with pytest.raises(IndexOutOfRangeError, match=f"{bad_index} is not from 0 to 3"):
            module(X, torch.tensor([0, bad_index]))


def test_negative_indices_of_a_list_count_from_the_end() -> None:
    module = insert_checks(lambda x, index: x[index], X, INDEX)
    assert torch.equal(module(X, torch.tensor([-4, -1])), X[[-4, -1]])
    with pytest.raises(IndexOutOfRangeError, match="-5 is not from -4 to 3"):
        module(X, torch.tensor([0, -5]))


def test_nothing_is_added_for_other_devices() -> None:
    function = call("index_select.default", table, 0, index_of)
    module = insert_checks(function, X.to("meta"), INDEX.to("meta"))
    assert list_bounds(module) == []


def test_the_operator_returns_memory_of_its_own() -> None:
    checked = index_checks._get_operator()(INDEX, 0, 4)
    assert torch.equal(checked, INDEX)
    assert checked.data_ptr() != INDEX.data_ptr()
    torch.library.opcheck(index_checks._get_operator(), (INDEX, 0, 4))


def test_inductor_raises_where_eager_does() -> None:
    function = call("index_select.default", table, 0, index_of)
    compiled = torch.compile(function, options=cpu_index_checks(), dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(X, INDEX), X[INDEX])
        with pytest.raises(IndexOutOfRangeError):
            compiled(X, INDEX + 9)
        with pytest.raises(IndexError, match="index out of range in self"):
            raise_as_eager(compiled, function)(X, INDEX + 9)


DIVISIONS: dict[str, Callable[..., Any]] = {
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc") * 2,
    "floor": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
    "of a number": lambda a, b: 7 % b + a,
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("kind", DIVISIONS)
def test_an_integer_divided_by_zero_raises_as_eager_does(kind: str, dtype: torch.dtype) -> None:
    function = DIVISIONS[kind]
    # So many that Inductor's loop is parallel, where nothing can catch what it throws.
    a = torch.arange(8192).remainder(100).to(dtype)
    b = torch.full((8192,), 3).to(dtype)
    zero = b.clone()
    zero[4097] = 0
    torch._dynamo.reset()
    compiled = torch.compile(function, options=cpu_index_checks(), dynamic=False)
    with torch.no_grad():
        assert torch.equal(compiled(a, b), function(a, b))
        with pytest.raises(ZeroDivisorError):
            compiled(a, zero)
        with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
            raise_as_eager(compiled, function)(a, zero)
        assert not isinstance(caught.value, ZeroDivisorError)


def test_a_division_of_floats_or_by_a_number_is_not_checked() -> None:
    def count_checks(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
        graph = make_fx(function)(*inputs).graph
        for node in list(graph.nodes):
            node.meta.setdefault("val", inputs[0])
            index_checks._check_divisor_of(graph, node)
        return sum("checked_divisor" in str(node.target) for node in graph.nodes)

    index_checks._get_operator()
    assert count_checks(DIVISIONS["trunc"], torch.ones(3), torch.ones(3)) == 0
    assert count_checks(lambda a: a % 3, torch.arange(3)) == 0
    assert count_checks(DIVISIONS["remainder"], torch.arange(3), torch.ones(3).int()) == 1


def test_the_operator_for_divisors_returns_memory_of_its_own() -> None:
    index_checks._get_operator()
    operator = torch.ops.cudal1.checked_divisor.default
    divisor = torch.arange(1, 4)
    assert torch.equal(operator(divisor), divisor)
    assert operator(divisor).data_ptr() != divisor.data_ptr()
    torch.library.opcheck(operator, (divisor,))
    with pytest.raises(ZeroDivisorError):
        operator(torch.tensor([1, 0]))
    operator(torch.empty(0, dtype=torch.int64))


@pytest.mark.usefixtures("dynamo")
def test_a_trace_that_would_lose_the_check_of_probabilities_is_refused() -> None:
    module = trace_with_dynamo(torch.nn.BCELoss(), torch.rand(4), torch.rand(4))
    refusal = find_lost_check(module)
    assert isinstance(refusal, Refusal)
    assert "outside of [0, 1]" in refusal.reason


def test_only_an_index_out_of_range_runs_the_eager_forward() -> None:
    def fail(error: Exception) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            raise error

        return run

    assert raise_as_eager(fail(IndexOutOfRangeError("9")), lambda x: x + 1)(1) == 2
    with pytest.raises(IndexError, match="another"):
        raise_as_eager(fail(IndexError("another")), lambda x: x + 1)(1)


def trace_with_dynamo(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    return graphs[0]


@pytest.mark.usefixtures("dynamo")
def test_class_values_of_one_hot_are_checked_in_a_copy_of_the_graph() -> None:
    module = trace_with_dynamo(lambda x: F.one_hot(x, 4) + 1, INDEX)
    refusal = find_lost_check(module)
    assert isinstance(refusal, Refusal)
    assert "one_hot" in refusal.reason
    checked_module = add_class_checks(module)
    assert checked_module is not module
    assert list_bounds(module) == []
    assert list_bounds(checked_module) == [(0, 4)]
    assert torch.equal(checked_module(INDEX)[0], F.one_hot(INDEX, 4) + 1)
    with pytest.raises(IndexOutOfRangeError):
        checked_module(INDEX + 4)


@pytest.mark.usefixtures("dynamo")
def test_a_graph_without_indices_stays_as_it_is() -> None:
    module = trace_with_dynamo(lambda x: x.relu() + 1, X)
    assert not has_indices(module)
    assert find_lost_check(module) is None
    assert add_class_checks(module) is module
    assert has_indices(trace_with_dynamo(lambda x, index: x[index], X, INDEX))
    assert find_lost_check(torch.nn.ReLU()) is None
