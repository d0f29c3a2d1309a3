"""Proposals cross a process border as JSON."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.kernels import Proposal, propose


def test_a_proposal_survives_json() -> None:
    for proposal in propose(trace_program(torch.sum, (torch.empty(1 << 22),)), 90):
        assert Proposal.from_json(proposal.to_json()) == proposal
        assert canonical_json(proposal.to_json())
    with pytest.raises(ProgramError):
        Proposal.from_json({"family": "softmax", "config": {"rows": [1]}})
    with pytest.raises(ProgramError):
        Proposal.from_json({"config": {}})


def test_a_number_of_a_config_is_read_as_one_or_refused() -> None:
    proposal = Proposal("gemm", {"rows": 64, "method": "half", "split": -1})
    assert proposal.number("rows", 1) == 64
    assert proposal.number("warps", 4) == 4
    for name in ("method", "split"):
        with pytest.raises(ProgramError, match=name):
            proposal.number(name, 1)
