"""On a GPU, the machine code itself gives what float64 gives, for every case and proposal that the
interpreter is asked.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.cases import all_cases
from tests.kernels.compare import errors, outputs_of
from tests.kernels.traced_programs import trace_program
from torch_cudal1.kernels import build, propose
from torch_cudal1.runtime.executor import prepare

NAMES = sorted(all_cases())


def place_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the same strides; what shares its elements shares them there."""
    sizes = [
        size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    room = torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device="cuda")
    room.copy_(tensor.as_strided(sizes, tensor.stride()))
    return room.as_strided(tensor.shape, tensor.stride())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_machine_code_matches_float64(name: str) -> None:
    function, host_inputs = all_cases()[name]
    major, minor = torch.cuda.get_device_capability()
    program = trace_program(function, host_inputs)
    inputs = [place_on_gpu(tensor) for tensor in host_inputs]
    # Next to the distance of its mean from zero a value is rounded coarsely, and a difference from
    # the mean shows it.
    far = max(
        (
            float(t.double().nanmean().abs().nan_to_num(posinf=0.0))
            for t in host_inputs
            if t.is_floating_point()
        ),
        default=0.0,
    )
    eager = outputs_of(function, inputs)
    exact = outputs_of(function, [t.double() if t.is_floating_point() else t for t in inputs])
    proposals = propose(program, 10 * major + minor)
    assert proposals
    for proposal in proposals:
        run = prepare(build(program, proposal, 10 * major + minor), torch.device("cuda"))
        first, second = run(inputs), run(inputs)
        for got, again, plain, wide in zip(first, second, eager, exact, strict=True):
            assert got is not None
            assert again is not None
            fact = errors(got, plain, wide)
            # There eager's multiply-adds are one rounding. Where a sum of large addends is near
            # zero, ours of two shows.
            limit = max(2.5 if got.dtype.itemsize == 2 else 32.0 * (1 + far), 2.5 * fact["eager"])
            assert fact["spec"], f"{proposal}: dtype, shape or strides differ: {fact}"
            assert fact["special"], f"{proposal}: NaN or infinity misplaced: {fact}"
            assert fact["error"] <= limit, f"{proposal}: error over {limit}: {fact}"
            assert torch.equal(
                got.nan_to_num(), again.nan_to_num()
            )  # no atomics, no races: the same bits every time
