"""Depthwise convolutions: which are served, and by which tiles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.kernels import Proposal, propose
from torch_cudal1.kernels.lowering import lower

X, W = torch.empty(2, 8, 32, 32), torch.empty(8, 1, 3, 3)


def program():
    return trace_program(lambda x, w: F.conv2d(x, w, padding=1, groups=8), (X, W))


def test_groups_of_one_channel_are_served_on_every_architecture() -> None:
    for sm in (80, 90, 100):
        proposals = propose(program(), sm)
        assert proposals
        assert all(proposal.config.keys() == {"rows", "width"} for proposal in proposals)


def test_nonsense_tiles_are_refused() -> None:
    for config in ({"rows": 0, "width": 32}, {"rows": 8, "width": 5}, {"rows": 999, "width": 32}):
        with pytest.raises(ProgramError, match="rows and"):
            lower(program(), Proposal("conv", config))
