"""Schedules of a convolution: ordered by a bound, within shared memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.device.specs import max_shared_bytes
from torch_cudal1.kernels import Proposal
from torch_cudal1.kernels.ops.convolutions import find_convolution
from torch_cudal1.kernels.registry import trace
from torch_cudal1.kernels.templates.conv_tiles import choose_schedules, lay_out, read_schedule

X, W = torch.empty(4, 32, 32, 32), torch.empty(64, 32, 3, 3)


def convolution():
    program = trace_program(lambda x, w: F.conv2d(x, w, padding=1), (X, W))
    return find_convolution(tuple(o.node for o in trace(program).outputs))[1]


def test_schedules_fit_the_device_and_survive_as_proposals() -> None:
    schedules = choose_schedules(convolution(), 1, 6)
    assert len(set(schedules)) == 6
    for schedule in schedules:
        block = lay_out(convolution(), schedule)
        assert block.shared_bytes * schedule.blocks <= max_shared_bytes(90)
        assert read_schedule(schedule.proposal()) == schedule


def test_a_nonsense_schedule_is_refused() -> None:
    config = dict(choose_schedules(convolution(), 1, 1)[0].proposal().config)
    for change in ({"x": 3}, {"columns": 7}, {"products": 2}, {"stages": 1}):
        with pytest.raises(ProgramError, match="is no tile"):
            read_schedule(Proposal("conv", config | change))
    with pytest.raises(ProgramError, match="a convolution"):
        read_schedule(Proposal("conv", {"rows": 8}))
