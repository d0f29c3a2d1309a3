"""A CUDA graph of a Program that draws random numbers: its replays draw the numbers that eager's
calls would.

A captured operator reads seed and offset of CUDA's default generator from memory. Before each
replay PyTorch writes the generator's present state there, and advances it by what one call draws.
So a replay continues the user's sequence, seeded or not, and leaves it where eager leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.aten import is_random
from torch_cudal1.ir.program import Aten, Call, Program, Step
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.runtime.cuda_graph import GraphCapture, GraphedRunner

__all__ = ["RandomGraph", "refuse_host_numbers"]


class RandomGraph(GraphedRunner):
    """As `GraphedRunner`, for a function that draws from the default generator of its CUDA device."""

    def _make_native(self, inputs: int) -> None:
        # torch.cuda.CUDAGraph.replay advances the generator; the C++ replay launches the graph
        # without it.
        self.interpreted = "its replay must move the random generator on"

    def _capture(self, inputs: Sequence[torch.Tensor]) -> GraphCapture:
        """As `GraphedRunner._capture`; the user's sequence of random numbers stays where it was."""
        # Warm-up and capture draw numbers too, which no call of the user returns.
        before = torch.cuda.get_rng_state(self._device)
        try:
            return super()._capture(inputs)
        finally:
            torch.cuda.set_rng_state(before, self._device)


def refuse_host_numbers(program: Program) -> None:
    """Raises NotLowerableError where random numbers are drawn on the CPU: every replay would repeat
    those of the capture.
    """
    specs = value_specs(program)
    for step in program.steps:
        if isinstance(step, Call):
            refuse_host_numbers(step.program)
        # Such a draw runs on the host at capture only; a replay would repeat its numbers.
        elif _draws_random_numbers(step) and any(
            specs[out].device != "cuda" for out in step.writes if out in specs
        ):
            raise NotLowerableError(
                "a CUDA graph of random numbers drawn on the CPU would repeat them"
            )


def _draws_random_numbers(step: Step) -> bool:
    return isinstance(step, Aten) and is_random(step.target, step.args, dict(step.kwargs))
