"""What a cut between two steps would part: steps that Inductor fuses, and a product from what is
done to its result.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.ir.stacks import capture_region
from torch_cudal1.ir.fusible_pairs import FusiblePairs, is_library_call
from torch_cudal1.ir.program import Program

SIZE = 8
X = torch.randn(SIZE, SIZE)


class Steps(nn.Module):
    """A function of an input and a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def capture(function: Callable[[Tensor, Tensor], Tensor]) -> Program:
    return capture_region(Steps(function).eval(), X).program


@pytest.mark.parametrize(
    ("function", "cut", "fusible", "epilogues"),
    [
        (lambda x, w: torch.relu(x).exp(), 1, 1, 0),
        (lambda x, w: torch.relu(x @ w), 1, 0, 1),
        (lambda x, w: torch.relu(x) @ w, 1, 0, 0),
        # A view between them is no kernel.
        (lambda x, w: torch.relu((x @ w).t()), 1, 0, 1),
        (lambda x, w: torch.relu((x @ w).t()), 2, 0, 1),
        # The sum waits for the product of what it reads.
        (lambda x, w: (lambda y: y + y @ w)(torch.relu(x)), 1, 0, 0),
        (lambda x, w: (lambda y: y + y @ w)(torch.relu(x)), 2, 0, 1),
    ],
)
def test_a_cut_parts_what_one_kernel_would_compute(
    function: Callable[[Tensor, Tensor], Tensor], cut: int, fusible: int, epilogues: int
) -> None:
    program = capture(function)
    pairs, length = FusiblePairs(program), len(program.steps)
    assert pairs.count_parted(cut, length) == fusible
    assert pairs.count_parted_epilogues(cut, length) == epilogues


def test_only_as_many_steps_count_as_a_layer_has() -> None:
    pairs = FusiblePairs(capture(lambda x, w: x.relu() + x.exp().sin().cos()))
    assert pairs.count_parted(2, 4) == 2
    # The sum is further away than that.
    assert pairs.count_parted(2, 2) == 1


def test_products_are_library_calls() -> None:
    program = capture(lambda x, w: torch.relu(x @ w))
    assert [is_library_call(step) for step in program.steps] == [True, False]
