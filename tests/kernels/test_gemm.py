"""Matrix products give what float64 gives in every layout, with epilogues; what is proposed fits
the rights and the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.compare_products import CASES, HALF, TILES
from tests.kernels.traced_programs import trace_program
from tests.once import chosen_names, run_interpreted
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.device.cuda.cubin import check_launch, inspect_cubin
from torch_cudal1.device.cuda.nvrtc import nvrtc_status
from torch_cudal1.device.specs import max_shared_bytes
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Launch, Program
from torch_cudal1.judge.checks.static.cubin_scan import cubin_scan
from torch_cudal1.kernels import build, propose
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.registry import trace
from torch_cudal1.kernels.templates.gemm_tiled import read_parts
from torch_cudal1.kernels.templates.gemm_tiles import GemmSchedule

ROOT = Path(__file__).parents[2]
# Of the output dtype, where eager itself has fewer. fp32 sums of up to 300 terms in another order
# are about sqrt(300) roundings of the typical size apart, and an element near zero is measured in
# tenths of that size. The interpreter multiplies in fp32, whatever the method: how exact the
# methods are is test_gemm_device's question.
ROUNDINGS = 128.0
A, B, BIAS = torch.empty(256, 512), torch.empty(512, 384), torch.empty(384)
PACKED = (
    GemmSchedule("packed-f16x3", 128, 128, 64, 8, 3, 8),
    GemmSchedule("packed-f16x3", 128, 192, 64, 8, 2, 8),
    GemmSchedule("packed-f16x3", 128, 128, 64, 8, 3, 8, 1, 1, 2),
    GemmSchedule("packed-bf16x6", 128, 96, 64, 8, 2, 8),
    GemmSchedule("packed-f16x1", 128, 64, 64, 8, 8, 8, 1, 4),
    GemmSchedule("packed-f16x1", 128, 256, 64, 8, 4, 4, 1, 0, 2),
)
needs_nvrtc = pytest.mark.skipif(not nvrtc_status()[0], reason=nvrtc_status()[1])
Facts = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    names = chosen_names(request)
    return run_interpreted("tests.kernels.compare_products", names, tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_every_method_matches_float64(facts: Facts, name: str) -> None:
    assert len(facts[name]) >= len(HALF if "half" in name else TILES)
    for fact in facts[name]:
        coarse = 20 * 2.0**13 if fact["config"]["method"] == "tf32" else ROUNDINGS
        limit = max(2.5 if "16" in fact["dtype"] else coarse, 2.0 * fact["eager"])
        assert fact["spec"], f"dtype, shape or strides differ: {fact}"
        assert fact["special"], f"NaN or infinity misplaced: {fact}"
        assert fact["error"] <= limit, f"error over {limit}: {fact}"


def product_program(function: Callable[..., Any] = torch.mm, *inputs: Tensor) -> Program:
    return trace_program(function, inputs or (A, B))


def methods(program: Program, sm: int, rights: tuple[str, ...] = ()) -> set[str]:
    return {str(p.config["method"]) for p in propose(program, sm, rights, most=100)}


def test_methods_no_more_exact_than_tf32_need_the_right() -> None:
    program = product_program(torch.mm, torch.empty(4096, 4096), torch.empty(4096, 4096))
    assert methods(program, 90) == {
        "bf16x6",
        "tf32x3",
        "packed-f16x3",
        "packed-bf16x6",
        "packed-stream",
    }
    assert methods(program, 90, ("conv",)) == methods(program, 90)
    assert methods(program, 90, ("matmul",)) == methods(program, 90) | {"tf32", "packed-f16x1"}


def test_wgmma_is_for_hopper_only() -> None:
    for sm in (80, 86, 89, 100, 120):
        assert not any(
            name.startswith("packed") for name in methods(product_program(), sm, ("matmul",))
        )
    assert methods(product_program(), 75) == set()


def test_half_types_are_never_split_and_fp32_is_never_rounded_to_them() -> None:
    program = product_program(torch.mm, A.half(), B.half())
    assert methods(program, 80, ("matmul",)) == {"half"}
    assert methods(program, 90, ("matmul",)) == {"half", "wgmma"}
    with pytest.raises(NotLowerableError, match="half"):
        lower(product_program(), HALF[0].proposal())
    with pytest.raises(NotLowerableError, match="float16"):
        lower(product_program(torch.mm, A.half(), B.half()), TILES[0].proposal())


@pytest.mark.parametrize(
    ("function", "inputs", "word"),
    [
        (lambda a, b: (a + 1) @ b, (A, B), "computed in the fusion group"),
        (lambda a, b: (a @ b).softmax(-1), (A, B), "whole rows"),
        (lambda a, b: (a @ b) + (a @ b.abs()), (A, B), "2 matrix products"),
        (lambda a, b: (a @ b).t() + (a @ b).t().clone(), (A, B), "2 matrix products"),
        (lambda a: (_y := a @ a) + _y.t(), (torch.empty(64, 64),), "another element"),
        (lambda a, b: (a @ b).double(), (A, B), "float64"),
        (lambda a, b: a.int() @ b.int(), (A.int(), B.int()), "int32"),
    ],
)
def test_what_is_not_one_product_with_element_wise_steps_is_refused(
    function: Any, inputs: tuple[Tensor, ...], word: str
) -> None:
    program = trace_program(function, inputs)
    assert propose(program, 90, ("matmul",)) == ()
    with pytest.raises(NotLowerableError, match=word):
        read_parts(trace(program))


def test_a_product_of_huge_tensors_is_addressed_with_64_bits() -> None:
    with torch.device("meta"):
        wide, narrow = torch.empty(70000, 40000), torch.empty(40000, 64)
    schedule = GemmSchedule("bf16x6", 64, 64, 32).proposal()
    assert (
        "to(tl.int64)" in lower(product_program(torch.mm, wide, narrow), schedule).kernels[0].text
    )
    assert "to(tl.int64)" not in lower(product_program(), schedule).kernels[0].text


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_a_product_compiles_for_each_architecture(sm: int) -> None:
    program = product_program(lambda c, a, b: F.gelu(torch.addmm(c, a, b)), BIAS, A, B)
    schedule = GemmSchedule("bf16x6", 64, 64, 32, 4, 2)
    built = build(program, schedule.proposal(), sm)
    check_program(built)
    (launch,) = (step for step in built.steps if isinstance(step, Launch))
    check_launch(inspect_cubin(bytes(built.payloads[launch.payload].numpy())), launch, sm)
    assert launch.shared_bytes <= max_shared_bytes(sm)


def test_a_split_product_compiles_to_two_launches_of_one_scratch_tensor() -> None:
    built = build(product_program(), GemmSchedule("tf32x3", 64, 64, 32, 4, 3, 8, 4).proposal(), 90)
    check_program(built)
    first, second = (step for step in built.steps if isinstance(step, Launch))
    assert {arg.value for arg in first.args} & {arg.value for arg in second.args} - {None}
    assert all(check.passed for check in cubin_scan(built, 90))


@needs_nvrtc
@pytest.mark.parametrize("schedule", PACKED, ids=lambda s: f"{s.method} {s.columns}")
def test_packed_products_compile_to_pure_machine_code_without_spills(
    schedule: GemmSchedule,
) -> None:
    program = product_program(
        lambda c, a, b: F.silu(F.gelu(torch.addmm(c, a, b.t())) * 0.5 + c),
        BIAS,
        A,
        torch.empty(384, 512),
    )
    built = build(program, schedule.proposal(), 90)
    check_program(built)
    launches = [step for step in built.steps if isinstance(step, Launch)]
    assert [launch.block for launch in launches] == [256, 256, 384]
    assert all(check.passed for check in cubin_scan(built, 90))
    for launch in launches:
        kernel = check_launch(
            inspect_cubin(bytes(built.payloads[launch.payload].numpy())), launch, 90
        )
        assert kernel.stack_bytes == 0
        assert launch.shared_bytes <= max_shared_bytes(90)


@needs_nvrtc
def test_a_tile_that_does_not_fit_the_shared_memory_is_refused() -> None:
    with pytest.raises(NotLowerableError, match="shared memory"):
        build(
            product_program(), GemmSchedule("packed-bf16x6", 128, 192, 64, 8, 4, 8).proposal(), 90
        )


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda c, a, b: (_y := torch.addmm(c, a, b), _y + 1), "writes one tensor"),
        (lambda c, a, b: torch.addmm(c, a, b).half(), "writes one tensor"),
        (lambda c, a, b: torch.addmm(c, a, b) + c.half(), "float16"),
    ],
)
def test_a_tail_without_a_form_in_c_is_left_to_the_tiled_methods(function: Any, word: str) -> None:
    with pytest.raises(NotLowerableError, match=word):
        lower(trace_program(function, (BIAS, A, B)), PACKED[0].proposal())
