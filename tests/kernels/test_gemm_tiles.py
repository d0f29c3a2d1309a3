"""Schedules of a matrix product: ordered by a bound, split where tiles leave the device idle, and
refused by name when they are nonsense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels import Proposal
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.ops.matmul import Product, find_product
from torch_cudal1.kernels.registry import trace
from torch_cudal1.kernels.templates.gemm_tiles import GemmSchedule, choose_schedules, estimate_s

A, B, BIAS = torch.empty(256, 512), torch.empty(512, 384), torch.empty(384)


def product_program(function: Callable[..., Any] = torch.mm, *inputs: Tensor) -> Program:
    return trace_program(function, inputs or (A, B))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"method": "magic"}, "expected one of"),
        ({"rows": 24}, "powers of two"),
        ({"columns": 8}, "powers of two"),
        ({"rows": 512, "columns": 512}, "powers of two"),
        ({"warps": 3}, "warps"),
        ({"split": 0}, "positive"),
        ({"depth": "deep"}, "number"),
        ({"method": "packed-f16x3", "rows": 64}, "packed tile"),
        (
            {"method": "packed-f16x3", "rows": 128, "columns": 128, "depth": 64, "promote": 0},
            "less exact",
        ),
        (
            {"method": "packed-f16x3", "rows": 128, "columns": 128, "depth": 64, "cluster": 3},
            "cluster",
        ),
        ({"cluster": 2}, "cluster"),
        ({"method": "packed-f16x3", "rows": 128, "columns": 256, "depth": 64}, "packed tile"),
    ],
)
def test_a_nonsense_schedule_is_refused_by_name(change: dict[str, Any], word: str) -> None:
    config = {**GemmSchedule("bf16x6", 64, 64, 32).proposal().config, **change}
    with pytest.raises(ProgramError, match=word):
        lower(product_program(), Proposal("gemm", config))


def large(m: int, n: int, k: int) -> Product:
    with torch.device("meta"):
        program = product_program(torch.mm, torch.empty(m, k), torch.empty(k, n))
    return find_product(tuple(o.node for o in trace(program).outputs))[1]


def test_the_first_schedules_have_small_bounds_and_differ() -> None:
    product = large(4096, 4096, 4096)
    schedules = choose_schedules(product, 90, most=100)
    bounds = [estimate_s(product, schedule) for schedule in schedules]
    assert bounds[0] == min(bounds)
    assert schedules[0].method == "packed-f16x3"
    assert len({schedule.method for schedule in schedules[:4]}) >= 2
    of_method = [
        estimate_s(product, schedule) for schedule in schedules if schedule.method == "bf16x6"
    ]
    assert of_method == sorted(of_method)


def test_products_are_split_where_tiles_do_not_fill_the_device() -> None:
    assert choose_schedules(large(64, 64, 65536), 90)[0].split > 16
    assert {
        schedule.split for schedule in choose_schedules(large(8192, 8192, 8192), 90, most=100)
    } == {1}
