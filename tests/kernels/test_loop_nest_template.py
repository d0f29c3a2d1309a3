"""Templates of loop nests: one split at most, and a symbol of their family."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.kernels import Proposal, propose
from torch_cudal1.kernels.lowering import lower

X = torch.empty(2, 1 << 20)


def test_one_number_of_programs_a_row_is_proposed() -> None:
    program = trace_program(lambda x: x.sum(-1), (X,))
    splits = {proposal.number("split", 1) for proposal in propose(program, 90, most=20)}
    assert len(splits - {1}) == 1


def test_kernels_are_named_after_their_family_and_warps_are_powers_of_two() -> None:
    program = trace_program(lambda x: x * 2, (X,))
    (kernel,) = lower(program, Proposal("elementwise", {"rows": 1024, "warps": 4})).kernels
    assert kernel.symbol.startswith("elementwise_")
    assert kernel.grid == X.numel() // 1024
    with pytest.raises(ProgramError, match="3 warps"):
        lower(program, Proposal("elementwise", {"rows": 1024, "warps": 3}))
