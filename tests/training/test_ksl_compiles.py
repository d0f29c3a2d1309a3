"""One program of every template compiles for sm_90, and some are too large for a multiprocessor, as
they are meant to be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_cudal1.training.ksl.spaces import SPACES

ROOT = Path(__file__).parents[2]
MOST_SHARED = 232_448  # bytes that a block of sm_90 can have
PROGRAMS = {
    "chain.flat": (
        "scale_gelu_add",
        "64x100",
        "block=1024 warps=4 persist=on fuse=split mask=on acc=f16",
    ),
    "row.one": ("layer_norm", "8x300", "rows=2 warps=4 persist=on mask=on acc=f32"),
    "row.two": ("cross_entropy", "8x300", "block=512 warps=4 stages=3 mask=on acc=f16"),
    "row.online": ("softmax", "8x300", "block=512 warps=4 stages=1 mask=on acc=f32"),
    "mm.tiles": (
        "linear_relu",
        "128x256x64",
        "block_m=64 block_n=128 block_k=32 warps=4 stages=3 group_m=8 mask=on acc=f16",
    ),
    "mm.split": (
        "matmul",
        "128x256x64",
        "block_m=64 block_n=64 block_k=32 split_k=2 warps=4 mask=off",
    ),
    "diag.tile": (
        "tril_scale",
        "32x200",
        "block_m=4 block_n=128 warps=4 axis=right mask=on acc=f16",
    ),
    "scan.one": ("reverse_cumsum", "8x300", "rows=2 warps=4 mask=on acc=f32"),
    "scan.carry": ("cumsum", "8x300", "block=256 warps=4 carry=on mask=on acc=f32"),
    "pool.flat": (
        "max_pool1d",
        "2x3x70",
        "block=128 warps=4 persist=on unroll=off mask=on acc=f16",
    ),
}
TOO_LARGE = (
    "matmul",
    "256x256x512",
    "tpl=mm.tiles block_m=128 block_n=256 block_k=64 warps=8 stages=5 group_m=8 mask=off acc=f32",
)


@pytest.fixture(scope="module")
def shared_bytes() -> list[list[int]]:
    programs = [
        [name, shape, f"tpl={template} {knobs}"]
        for template, (name, shape, knobs) in PROGRAMS.items()
    ] + [list(TOO_LARGE)]
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.triton_compiled", json.dumps(programs)]
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return list(json.loads(process.stdout))


def test_a_program_of_every_template_compiles(shared_bytes: list[list[int]]) -> None:
    assert {template.name for template in SPACES["cuda"]} == set(PROGRAMS)
    assert all(kernels and max(kernels) <= MOST_SHARED for kernels in shared_bytes[:-1]), (
        shared_bytes
    )


def test_tiles_that_overflow_shared_memory_are_among_the_programs(
    shared_bytes: list[list[int]],
) -> None:
    assert max(shared_bytes[-1]) > MOST_SHARED
