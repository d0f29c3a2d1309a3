"""The graphs of a trace with their choices: which tensors they are tried on, and what is known of a
failure.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cudal1.api.graphs.traced_graph import FilledGraph, select_example_tensors


def make_lowered(kind: str, *order: int) -> Any:
    return SimpleNamespace(region=SimpleNamespace(kind=kind), order=order)


def test_examples_are_the_users_tensors_in_the_regions_order() -> None:
    inputs = [torch.randn(2, requires_grad=True), torch.randn(3)]
    examples = select_example_tensors(make_lowered("inference", 1, 0), inputs)
    assert examples is not None
    assert [item.data_ptr() for item in examples] == [item.data_ptr() for item in reversed(inputs)]
    assert not any(item.requires_grad for item in examples)


def test_a_backward_and_fake_tensors_have_no_examples() -> None:
    assert select_example_tensors(make_lowered("backward", 0), [torch.randn(2)]) is None
    with FakeTensorMode():
        assert select_example_tensors(make_lowered("inference", 0), [torch.randn(2)]) is None


def test_a_graph_that_fell_back_says_why() -> None:
    swapped: list[Any] = [SimpleNamespace(quarantined=""), SimpleNamespace(quarantined="")]
    refills: list[str] = []
    filled = FilledGraph(lambda x: x + 1, swapped, lambda: refills.append("filled"))
    assert (filled(1), filled.quarantined) == (2, "")
    # Another contender of the same trace may have been called in between.
    assert refills == ["filled"]
    swapped[1].quarantined = "RuntimeError: no graph today"
    assert filled.quarantined == "RuntimeError: no graph today"
