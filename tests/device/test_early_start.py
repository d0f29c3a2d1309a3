# ruff: noqa: F811  fixtures of another file are arguments here
"""A kernel is launched before the one ahead of it has ended if it waits for that itself, ahead of
all that it reads, writes or decides; every other kernel is launched in the ordinary way.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.device.test_cubin import ADD, build  # noqa: F401
from tests.device.test_driver import GPU, VALUES, add, cuda, recorder_path  # noqa: F401
from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda import driver
from torch_cudal1.device.cuda.addresses import pack_launch
from torch_cudal1.device.cuda.cubin import inspect_cubin
from torch_cudal1.device.cuda.early_start import waits_first
from torch_cudal1.device.cuda.nvrtc import compile_cuda
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels import build as build_program
from torch_cudal1.kernels import propose

EARLY_START = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
RELEASE = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
PREFETCH = 'asm volatile("prefetch.global.L2 [%0];" ::"l"(o + threadIdx.x));'
BODIES = {  # text of a kernel's body -> whether it waits first
    f"{WAIT} o[0] = 1;": True,
    f"{RELEASE} {WAIT} o[threadIdx.x] = o[7] + n;": True,
    f"{PREFETCH} {RELEASE} {WAIT} o[threadIdx.x] = n;": True,
    f"int i = threadIdx.x * n / 7; {WAIT} o[i] = 1;": True,
    "o[0] = 1;": False,
    f"{RELEASE} o[0] = 1;": False,
    f"o[0] = 1; {WAIT}": False,
    f"int x = o[threadIdx.x]; {WAIT} o[0] = x;": False,
    f"if (n > 3) {WAIT} o[0] = 1;": False,
    f"for (int i = 0; i < n; ++i) {{ {WAIT} }} o[0] = 1;": False,
    f"__syncthreads(); {WAIT} o[0] = 1;": False,
    f"atomicAdd(o, 1); {WAIT} o[1] = 1;": False,
    f"if (threadIdx.x == 7) return; {WAIT} o[0] = 1;": False,
}


def find_code(cubin: bytes) -> bytes:
    ((_, code),) = inspect_cubin(cubin).code
    return code


@pytest.fixture
def compile_body() -> Callable[..., bytes]:
    """The machine code of a kernel with this body."""

    def compile_text(body: str, sm: str) -> bytes:
        text = f'extern "C" __global__ void kernel(int* o, int n) {{ {body} }}'
        built = compile_cuda(text, sm)
        if isinstance(built, Refusal):
            pytest.skip(built.reason)
        return built.cubin

    return compile_text


@pytest.mark.parametrize("sm", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("body", BODIES)
def test_a_kernel_waits_first_if_nothing_but_arithmetic_comes_before(
    body: str, sm: str, compile_body: Callable[..., bytes]
) -> None:
    assert waits_first(find_code(compile_body(body, sm))) == BODIES[body]


ACQBULK, ALWAYS, LOAD = 0x782E, 0x000FCA0000000000, 0x981


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([ACQBULK], True),
        ([0x082E], False),  # under predicate P0
        ([0xF82E], False),  # never executed
        ([0x7000 | LOAD, ACQBULK], False),
        ([0x7FFF, ACQBULK], False),  # an instruction that is not in the table
        ([0x7947, ACQBULK], False),  # a branch
        ([], False),
    ],
)
def test_an_instruction_is_read_by_its_bits(words: list[int], expected: bool) -> None:
    code = b"".join(struct.pack("<QQ", word, ALWAYS) for word in words)
    assert waits_first(code) is expected
    assert waits_first(code + b"\0" * 7) is expected


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


GROUPS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "a product of half types": (
        lambda x, w, b: torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b)),
        (_meta(128, 768), _meta(3072, 768), _meta(3072)),
    ),
    "a norm": (
        lambda x, w: torch.nn.functional.layer_norm(x, (768,), w, w),
        (_meta(128, 768), _meta(768)),
    ),
    "a softmax": (lambda x: x.softmax(-1), (_meta(128, 1000),)),
    "element-wise": (
        lambda x, y: torch.nn.functional.silu(x) * y,
        (_meta(128, 3000), _meta(128, 3000)),
    ),
    "a sum": (lambda x: x.sum(0), (_meta(1280, 3000),)),
    "a convolution": (
        lambda x, w: torch.nn.functional.conv2d(x, w, padding=1),
        (_meta(1, 64, 28, 28, dtype=torch.float32), _meta(64, 64, 3, 3, dtype=torch.float32)),
    ),
    "attention": (
        lambda q, k, v: (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v,
        tuple(torch.rand(1, 2, 128, 64, dtype=torch.bfloat16) for _ in range(3)),
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_of_templates_start_early_on_hopper_and_not_before(group: str) -> None:
    function, inputs = GROUPS[group]
    program = trace_program(function, inputs)
    proposals = {sm: propose(program, sm)[:1] for sm in (80, 90)}
    assert proposals[90]
    for sm, chosen in proposals.items():
        for proposal in chosen:
            for code in list_machine_code(build_program(program, proposal, sm)):
                assert waits_first(code) is (sm == 90)


def list_machine_code(program: Program) -> list[bytes]:
    """Of each kernel; payloads of a product may hold several."""
    return [
        code
        for payload in program.payloads.values()
        if payload.dtype == torch.uint8
        for _, code in inspect_cubin(bytes(payload.numpy())).code
    ]


# The launch
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def early(add: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A kernel that passes for one that waits first."""
    monkeypatch.setattr(driver, "waits_first", lambda code: len(code) > 0)
    return add


def test_a_kernel_that_waits_first_is_launched_with_the_attribute(
    cuda: Any, early: torch.Tensor
) -> None:
    loaded = driver.load_launch(early, ADD, GPU)
    assert loaded.starts_early
    (attribute,) = pack_launch(loaded)[5]
    assert (attribute[0], attribute[1][0]) == (EARLY_START, 1)
    driver.prepare_launch(early, ADD, GPU)(VALUES)
    attributes = (driver._LaunchAttribute * 4).in_dll(cuda.library, "launch_attributes")
    assert (attributes[0].id, attributes[0].value[0]) == (EARLY_START, 1)


def test_any_other_kernel_is_launched_without_it(cuda: Any, add: torch.Tensor) -> None:
    loaded = driver.load_launch(add, ADD, GPU)
    assert not loaded.starts_early
    assert pack_launch(loaded)[5] == []


def test_an_older_driver_starts_none_early(
    cuda: Any, early: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_EARLY_START_FUNCTION", "cuGraphOfALaterDriver")
    assert not driver.load_launch(early, ADD, GPU).starts_early


def test_a_cluster_keeps_its_own_attributes(cuda: Any) -> None:
    launch = dataclasses.replace(ADD, cluster=2)
    frame = driver.Frame(launch, starts_early=True)
    assert [attribute.id for attribute in frame.attributes] == [4, 5, EARLY_START]
