"""A CUDA graph of random numbers: draws on the host are refused; on a GPU its calls draw what
eager's calls draw, in that order.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import Program
from torch_cudal1.runtime.random_graph import refuse_host_numbers
from torch_cudal1.runtime.runner import build_runner

X = torch.zeros(64, 32)
DRAWING: dict[str, Callable[[torch.Tensor], object]] = {
    "noise": lambda x: torch.rand_like(x) + x,
    "dropout, twice": lambda x: torch.native_dropout(
        torch.native_dropout(x + 1, 0.5, True)[0], 0.3, True
    )[0],
}


def _program(name: str) -> Program:
    return trace_program(DRAWING[name], (X,))


def test_numbers_of_the_host_are_refused_and_those_of_the_device_are_not() -> None:
    refuse_host_numbers(_program("noise"))
    with pytest.raises(NotLowerableError, match="drawn on the CPU"):
        refuse_host_numbers(trace_program(DRAWING["noise"], (X,), device="cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", DRAWING)
def test_replays_continue_the_users_sequence_of_random_numbers(name: str) -> None:
    device, x = torch.device("cuda"), X.cuda()
    eager, graph = (
        build_runner(_program(name), schedule, device) for schedule in ("eager", "eager+graph")
    )
    sequences = []
    for run in (eager, graph):
        torch.cuda.manual_seed(3)
        drawn = [*run([x]), *run([x]), torch.rand(4, device=device), *run([x])]
        torch.cuda.manual_seed(4)
        sequences.append([*drawn, *run([x]), torch.rand(4, device=device)])
    for expected, replayed in zip(*sequences, strict=True):
        assert expected is not None
        assert replayed is not None
        assert torch.equal(expected, replayed)
    first, second = sequences[0][:2]
    assert first is not None
    assert second is not None
    assert not torch.equal(first, second)
