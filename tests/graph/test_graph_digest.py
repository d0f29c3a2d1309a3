"""A Dynamo graph has one digest in every process; whatever changes what it computes changes the
digest, and what cannot be named exactly has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch.testing._internal.two_tensor import TwoTensor

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.graph_digest import compute_graph_digest, compute_graph_outline

X = torch.randn(3, 4)


def build_graph(
    function: Callable[..., Any] = torch.add, *args: Any, name: str = "x", **kwargs: Any
) -> fx.GraphModule:
    """A graph that returns `function(x, *args, **kwargs)`."""
    graph = fx.Graph()
    x = graph.placeholder(name)
    graph.output((graph.call_function(function, (x, *args), kwargs),))
    return fx.GraphModule(torch.nn.Module(), graph)


def with_constant(value: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (x, graph.get_attr("constant"))),))
    root = torch.nn.Module()
    root.constant = value
    return fx.GraphModule(root, graph)


def digest(gm: fx.GraphModule, x: Any = X, extra: tuple[str, ...] = ()) -> str:
    result = compute_graph_digest(gm, [x], extra)
    assert isinstance(result, str)
    return result


def test_names_of_inputs_and_the_order_of_keywords_are_not_in_the_digest() -> None:
    plain = digest(build_graph(torch.add, 2, alpha=3, out=None))
    assert digest(build_graph(torch.add, 2, out=None, alpha=3)) == plain
    assert digest(build_graph(torch.add, 2, alpha=3, out=None, name="tokens")) == plain


CHANGES: dict[str, Callable[[], str]] = {
    "an operator": lambda: digest(build_graph(torch.sub, 2)),
    "an argument": lambda: digest(build_graph(torch.add, 3)),
    "its type": lambda: digest(build_graph(torch.add, 2.0)),
    "a keyword": lambda: digest(build_graph(torch.add, 2, alpha=2)),
    "the shape": lambda: digest(build_graph(torch.add, 2), torch.randn(4, 3)),
    "the strides": lambda: digest(build_graph(torch.add, 2), torch.randn(4, 3).t()),
    "the dtype": lambda: digest(build_graph(torch.add, 2), X.double()),
    "a gradient": lambda: digest(build_graph(torch.add, 2), X.clone().requires_grad_()),
    "a parameter": lambda: digest(
        build_graph(torch.add, 2), torch.nn.Parameter(X, requires_grad=False)
    ),
    "a setting": lambda: digest(build_graph(torch.add, 2), extra=("strict",)),
    "a list": lambda: digest(build_graph(torch.add, [0, 1, 2])),
    "a slice of its parts": lambda: digest(build_graph(torch.add, slice(0, 1, 2))),
    "a constant": lambda: digest(with_constant(torch.tensor([1.0, 2.0, 3.0, 4.0]))),
    "its values": lambda: digest(with_constant(torch.tensor([1.0, 2.0, 3.0, 5.0]))),
}


def test_whatever_changes_the_result_changes_the_digest() -> None:
    digests = {name: make() for name, make in CHANGES.items()}
    digests["nothing"] = digest(build_graph(torch.add, 2))
    assert len(set(digests.values())) == len(digests), digests


def test_modes_that_change_what_tracing_yields_are_in_the_digest() -> None:
    gm = build_graph(torch.add, 2)
    digests = [digest(gm)]
    with torch.no_grad():
        digests.append(digest(gm))
    with torch.autocast("cpu", torch.bfloat16):
        digests.append(digest(gm))
    torch.use_deterministic_algorithms(True)
    try:
        digests.append(digest(gm))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(set(digests)) == 4
    assert digest(gm) == digests[0]


def users_own(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("gm", "x", "reason"),
    [
        (build_graph(users_own), X, "users_own"),
        (build_graph(lambda x: x), X, "lambda"),
        (with_constant(object()), X, "attribute constant of type object"),
        (build_graph(torch.add, 2), 3, "input of type int"),
        (build_graph(torch.add, 2), X.to_sparse(), "input of type Tensor"),
        (build_graph(torch.add, {1, 2}), X, "of type set"),
    ],
    ids=["a user's function", "a lambda", "an object", "a number", "a sparse input", "an argument"],
)
def test_what_cannot_be_named_exactly_has_no_digest_and_a_reason(
    gm: fx.GraphModule, x: Any, reason: str
) -> None:
    result = compute_graph_digest(gm, [x])
    assert isinstance(result, Refusal)
    assert reason in result.reason


def test_an_outline_tells_graphs_by_their_nodes_and_not_by_their_arguments() -> None:
    assert compute_graph_outline(build_graph(torch.add, 2)) == compute_graph_outline(
        build_graph(torch.add, 3)
    )
    assert compute_graph_outline(build_graph(torch.add, 2)) != compute_graph_outline(
        build_graph(torch.sub, 2)
    )
    assert compute_graph_outline(build_graph(torch.add, 2)) != compute_graph_outline(
        build_graph(torch.add, 2, name="y")
    )


def test_a_tensor_made_of_others_has_no_digest() -> None:
    answer = compute_graph_digest(build_graph(torch.add, 2), [TwoTensor(X.clone(), X.clone())])
    assert isinstance(answer, Refusal)
    assert "TwoTensor" in answer.reason
