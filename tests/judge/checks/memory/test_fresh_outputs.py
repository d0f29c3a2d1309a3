"""Results are tensors of their own memory, and stay as they are in the caller's hands."""

from __future__ import annotations

import pytest
import torch

from tests.judge.sources import SourceBench, SourceCase
from torch_cudal1.judge.checks.memory.fresh_outputs import FRESH_OUTPUT, _find_changed

LAZY = """
class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})
"""
NAMED = "Tensor = type('Tensor', (torch.Tensor,), {})\nTensor.__module__ = 'torch'\n"
MODE = """
from torch.overrides import TorchFunctionMode
class Waiting(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
"""
SOURCES: dict[str, SourceCase] = {
    "a subclass": (
        {"top": LAZY, "result": "torch.relu(self.linear(x)).as_subclass(Later)"},
        (),
        "fresh_output",
        "Later",
    ),
    "a subclass that bears torch's name": (
        {"top": NAMED, "result": "torch.relu(self.linear(x)).as_subclass(Tensor)"},
        (),
        "fresh_output",
        "",
    ),
    "a mode left on": (
        {"top": MODE, "before": "Waiting().__enter__()"},
        (),
        "fresh_output",
        "modes",
    ),
    "no memory behind it": (
        {"result": "torch.relu(self.linear(x)).to('meta')"},
        (),
        "fresh_output",
        "",
    ),
    "a view of one's own result": (
        {"result": "torch.relu(self.linear(x)).unsqueeze(0).squeeze(0)"},
        (FRESH_OUTPUT,),
        None,
        "",
    ),
}


def test_exactly_the_changed_outputs_are_listed() -> None:
    before = [torch.ones(3), None, torch.zeros(2)]
    assert _find_changed(before, [torch.ones(3), None, torch.zeros(2)]) == []
    assert _find_changed(before, [torch.ones(3), None, -torch.zeros(2)]) == [2]
    assert _find_changed(before, [None, None, torch.zeros(2)]) == [0]


@pytest.mark.parametrize("name", SOURCES)
def test_a_result_that_is_no_plain_tensor_is_refused_and_a_view_of_it_passes(
    bench: SourceBench, name: str
) -> None:
    bench.assert_verdict(SOURCES[name])
