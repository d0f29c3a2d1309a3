"""Tiles follow the lengths and the layout of rows."""

from __future__ import annotations

import pytest

from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.kernels import propose


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((10000, 16), {"rows": 64, "columns": 16, "loop": False}),  # short rows share a program
        ((4096, 1024), {"rows": 1, "columns": 1024, "loop": False}),
        ((512, 30000), {"rows": 1, "columns": 32768, "loop": False}),
        (
            (512, 70000),
            {"rows": 1, "columns": 8192, "loop": False, "team": True},
        ),  # does not fit a tile, but several
        ((512, 200000), {"rows": 1, "columns": 8192, "loop": False, "team": True}),
        (
            (512, 9 << 20),
            {"rows": 1, "columns": 4096, "loop": True},
        ),  # too many tiles to run at the same time
        ((2, 1 << 20), {"split": 264, "loop": True}),  # two rows leave the device idle
    ],
)
def test_the_first_tile_follows_the_row_length(
    shape: tuple[int, int], expected: dict[str, object]
) -> None:
    spec = TensorSpec("float16", shape, (shape[1], 1), "cuda")
    reference = Program(
        (spec,), (Aten("aten._softmax.default", (Value(0), -1, False), (), (1,)),), (1,)
    )
    config = propose(reference, 90)[0].config
    if "split" in expected:
        assert config["split"] >= 64
    else:
        assert {key: config[key] for key in expected} == expected


def test_rows_that_are_neighbours_in_memory_share_a_program() -> None:
    spec = TensorSpec("float32", (16, 512, 4096), (512 * 4096, 4096, 1), "cuda")
    reference = Program((spec,), (Aten("aten.sum.dim_IntList", (Value(0), (1,)), (), (1,)),), (1,))
    assert all(proposal.config["rows"] >= 16 for proposal in propose(reference, 90))
