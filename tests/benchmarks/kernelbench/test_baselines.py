"""A CUDA graph is a baseline only of a module that it can replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.kernelbench import baselines
from benchmarks.kernelbench.loading import (
    make_inputs,
    make_module,
)
from tests.benchmarks.kernelbench.examples import load_source


class Remembers(nn.Module):
    """Puts what it has computed into itself."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.hidden = torch.zeros(4, device=device)  # an attribute: `cuda()` does not move it
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)  # in place: a graph sees that
        self.hidden = torch.tanh(x + self.hidden)
        return self.hidden


def test_tensors_that_a_module_puts_into_itself_are_seen() -> None:
    module = nn.Sequential(Remembers(), nn.BatchNorm1d(4))
    before = baselines.list_state_tensors(module)
    module[0](torch.ones(4))
    after = baselines.list_state_tensors(module)
    assert [name for name in after if after[name] is not before[name]] == ["0.hidden"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_module_that_puts_tensors_into_itself_is_not_captured() -> None:
    module = Remembers("cuda").cuda()
    with torch.no_grad(), pytest.raises(RuntimeError, match="assigns hidden"):
        baselines.STARTS["CUDA graph"](module, (torch.ones(4, device="cuda"),))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_hands_out_eagers_result_for_new_inputs(tmp_path: Path) -> None:
    device = torch.device("cuda")
    task = load_source(tmp_path)
    with torch.no_grad():
        module, inputs, new_inputs = (
            make_module(task, device, "eval"),
            make_inputs(task, device, 0),
            make_inputs(task, device, 1),
        )
        call = baselines.STARTS["CUDA graph"](module, inputs)
        assert (
            baselines.find_gross_error(
                baselines.copy_tensors(call(*new_inputs)),
                baselines.copy_tensors(module(*new_inputs)),
            )
            == ""
        )
        assert (
            baselines.find_gross_error(
                baselines.copy_tensors(call(*inputs)), baselines.copy_tensors(module(*new_inputs))
            )
            != ""
        )
