"""Which step makes a value and which steps read it, the outputs of the Program among the readers."""

from __future__ import annotations

import torch
from torch import nn

from tests.graph.regions import capture_region
from torch_cudal1.graph.fusion.uses import Uses, collect_uses


class Shared(nn.Module):
    """`tanh` is read by two steps, `exp` by one step and the caller."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x)
        z = torch.exp(y)
        return z, torch.sin(z) + y


def positions() -> tuple[Uses, dict[str, int]]:
    program = capture_region(Shared(), torch.randn(3, 4)).program
    uses = collect_uses(program)
    return uses, {step.target.split(".")[1]: i for i, step in enumerate(uses.steps)}


def test_every_value_has_its_maker_and_its_readers() -> None:
    uses, at = positions()
    (result,) = uses.steps[at["tanh"]].writes
    assert uses.maker[result] == at["tanh"]
    assert uses.readers[result] == {at["exp"], at["add"]}
    assert 0 not in uses.maker, "an input has no maker"
    assert uses.readers[0] == {at["tanh"]}


def test_an_output_of_the_program_is_read_outside_of_every_group() -> None:
    uses, at = positions()
    assert uses.is_used_only_in(at["tanh"], {at["exp"], at["add"]})
    assert not uses.is_used_only_in(at["tanh"], {at["exp"]})
    assert not uses.is_used_only_in(at["exp"], range(len(uses.steps)))
    assert uses.is_used_only_in(at["sin"], {at["add"]})
