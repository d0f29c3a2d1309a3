"""Launches of a proposal: one where that is enough, more where programs wait."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.kernels import Proposal
from torch_cudal1.kernels.lowering import lower

X = torch.empty(2, 1 << 16)
TILE = {"rows": 1, "columns": 2048, "warps": 8, "loop": True}


def count_launches(**changes: int | bool) -> int:
    program = trace_program(lambda x: x.softmax(-1), (X,))
    return len(lower(program, Proposal("softmax", TILE | changes)).kernels)


def test_a_split_row_takes_a_launch_for_each_level_and_its_combination() -> None:
    assert count_launches(split=1) == 1
    assert count_launches(split=4) > 2


def test_a_group_of_ctas_takes_one_launch_after_its_counters_are_cleared() -> None:
    assert count_launches(split=1, loop=False, team=True, columns=8192) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"columns": 2000}, "powers of two"),
        ({"loop": False}, "do not fit"),
        ({"rows": 64, "columns": 2048}, "tile of 64 x 2048"),
        ({"split": 7}, "in 7 pieces"),
    ],
)
def test_a_tile_that_does_not_fit_is_refused(changes, reason: str) -> None:
    with pytest.raises(ProgramError, match=reason):
        count_launches(**changes)
