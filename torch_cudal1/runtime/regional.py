"""Runs a Program through Inductor block by block: what occurs several times is compiled once.

PyTorch calls it regional compilation. A stack of 32 layers takes as long to compile as two; where no
fusion is lost at the ends of a block (`ir.blocks`), the kernels are those of the whole Program.
Between segments this process calls Python, so it is meant to be replayed by a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.ir.blocks import Segment, partition_blocks
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Program

__all__ = ["compile_by_blocks"]


def compile_by_blocks(
    program: Program, device: torch.device, compile_segment: Callable[[Program], Runner]
) -> Runner:
    """A callable from the Program's inputs to its outputs. `compile_segment` compiles one Program: the
    whole where no block occurs several times. Raises what it raises.
    """
    partition = partition_blocks(program)
    # Kernels in the place of blocks may leave nothing that repeats.
    if not partition.blocks:
        return compile_segment(program)
    runners: dict[str, Runner] = {}
    for segment in partition.segments:
        if segment.digest not in runners:
            runners[segment.digest] = compile_segment(segment.program)
    telemetry.record(
        "program", "by_blocks", segments=len(partition.segments), compiled=len(runners)
    )
    return _run_in_order(partition.program, partition.segments, runners, device)


def _run_in_order(
    program: Program,
    segments: Sequence[Segment],
    runners: dict[str, Runner],
    device: torch.device,
) -> Runner:
    constants = [program.payloads[name].to(device) for name in program.constants]
    input_count, outputs = len(program.inputs), program.outputs
    last_reader = {value: number for number, item in enumerate(segments) for value in item.inputs}
    output_values = set(outputs)
    # What no later segment reads is dropped at once: its memory serves the next one.
    calls = [
        (
            runners[segment.digest],
            segment.inputs,
            segment.outputs,
            [
                value
                for value in (*segment.inputs, *segment.outputs)
                if last_reader.get(value, number) <= number
                and value not in output_values
                # Inputs and constants are held by others anyway.
                and value >= input_count + len(constants)
            ],
        )
        for number, segment in enumerate(segments)
    ]

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values: dict[int, Any] = dict(enumerate((*inputs, *constants)))
        for runner, operands, results_at, last_uses in calls:
            results = runner([values[index] for index in operands])
            values.update(zip(results_at, results, strict=True))
            for index in last_uses:
                del values[index]
        return [None if index is None else values[index] for index in outputs]

    return run
