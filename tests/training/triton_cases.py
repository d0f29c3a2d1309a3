"""The process of `triton_facts`, with TRITON_INTERPRET=1 or on a GPU: prints one JSON with what
each program answered.

For each operation and program of a sample: the largest error against float64 relative to the
result's size, and how much of the result was not written. The interpreter cannot call libdevice, so
PyTorch stands in for it; what NaN does, and races, do not show.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.kernels.traced_programs import replace_libdevice
from torch_cudal1.judge.pool.measured import Decoded
from torch_cudal1.judge.worker.modules.source_modules import import_source
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.grammar import KslProgram
from torch_cudal1.training.ksl.ops import OPS, make_task

RAGGED = {
    "chain": (7, 300),
    "row": (5, 300),
    "mm": (70, 90, 50),
    "diag": (19, 150),
    "scan": (5, 300),
    "pool": (2, 3, 70),
}
CODEC = KslCodec("cuda")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
BROAD = ("fuse", "axis", "carry", "mask", "acc", "persist", "unroll", "group_m", "rows", "split_k")


def choose_programs(programs: list[KslProgram]) -> list[KslProgram]:
    """One program for each combination of template and knobs that change what is computed; speed's
    knobs at random.
    """
    drawn = random.Random(0).sample(programs, len(programs))
    program_of_knobs = {
        (program.template, *(program.knobs.get(name) for name in BROAD)): program
        for program in drawn
        if not program.hack
    }
    return random.Random(1).sample(
        sorted(program_of_knobs.values(), key=lambda program: program.text),
        min(len(program_of_knobs), 8),
    )


def compute_facts(name: str, folder: Path) -> list[dict[str, Any]]:
    """What the sample of an operation's programs computes."""
    op = OPS[name]
    task = make_task(name, RAGGED[op.kind], "float16" if op.kind == "mm" else "float32")
    reference = import_source(task.reference, folder)
    torch.manual_seed(0)
    inputs = [tensor.to(DEVICE) for tensor in reference.get_inputs()]
    exact = reference.Model()(
        *[tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    )
    program_facts = []
    for program in choose_programs(list(CODEC.programs(task))):
        decoded = CODEC.decode(task, program.text)
        assert isinstance(decoded, Decoded)
        result = import_source(decoded.source, folder).ModelNew()(*inputs)
        same = (
            result.shape == exact.shape
            and result.dtype == inputs[0].dtype
            and result.is_contiguous()
        )
        off = (result.double() - exact).abs() / (exact.abs() + exact.square().mean().sqrt())
        lost = float(off.isnan().double().mean())
        program_facts.append(
            {
                "program": program.text,
                "form": same,
                "error": float(off.nan_to_num(0.0).max()),
                "unwritten": lost,
            }
        )
    return program_facts


def main() -> None:
    """Print the facts of all operations."""
    if INTERPRETED:
        replace_libdevice()
    torch.use_deterministic_algorithms(True)  # `torch.empty` gives NaN: what is not written shows
    torch.utils.deterministic.fill_uninitialized_memory = True
    names = sys.argv[1:] or sorted(OPS)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({name: compute_facts(name, Path(folder)) for name in names}))


if __name__ == "__main__":
    main()
