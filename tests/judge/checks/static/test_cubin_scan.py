"""Machine code with known misdeeds is recognised, each misdeed by its name, and honest kernels of
nvcc and Triton pass.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_cudal1.device.cuda.cubin import Cubin, inspect_cubin
from torch_cudal1.ir.program import Alloc, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.static.cubin_scan import cubin_scan, list_impurities

NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")
KERNEL = 'extern "C" __global__ void {name}({kind}* o) {{ {body} }}\n'

# kernel name -> (element type, body, what the scan says, "" for nothing)
BODIES: dict[str, tuple[str, str, str]] = {
    "honest": ("float", "o[threadIdx.x] = 2.f * o[threadIdx.x + blockDim.x];", ""),
    "indices": (
        "unsigned",
        'unsigned s, w, l; asm volatile("mov.u32 %0, %%smid;" : "=r"(s)); asm volatile("mov.u32 %0, %%warpid;" : "=r"(w));'
        'asm volatile("mov.u32 %0, %%laneid;" : "=r"(l)); o[threadIdx.x + threadIdx.y + blockIdx.y] = s + w + l;',
        "",
    ),
    "device_atomic": (
        "int",
        "o[1] = atomicAdd(o, 1); __threadfence(); o[2] = atomicCAS(o, 1, 2);",
        "",
    ),
    "block_fence": ("int", "o[0] = 1; __threadfence_block(); o[1] = 2;", ""),
    "sleeper": ("int", "__nanosleep(100); o[0] = 1;", ""),
    "clock32": ("int", "o[threadIdx.x] = clock();", "SR_CLOCKLO"),
    "clock_high": (
        "unsigned",
        'unsigned a; asm volatile("mov.u32 %0, %%clock_hi;" : "=r"(a)); o[0] = a;',
        "SR_CLOCKHI",
    ),
    "clock64bit": ("long long", "o[threadIdx.x] = clock64();", "SR_CLOCKLO"),
    "timer": (
        "unsigned long long",
        'unsigned long long a; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(a)); o[0] = a;',
        "SR_GLOBALTIMERLO",
    ),
    "timer_high": (
        "unsigned",
        'unsigned a; asm volatile("mov.u32 %0, %%globaltimer_hi;" : "=r"(a)); o[0] = a;',
        "SR_GLOBALTIMERHI",
    ),
    "counter": (
        "unsigned",
        'unsigned a; asm volatile("mov.u32 %0, %%pm0;" : "=r"(a)); o[0] = a;',
        "SR_PM",
    ),
    "system_fence": ("int", "o[0] = 1; __threadfence_system(); o[1] = 2;", "MEMBAR"),
    "system_add": ("int", "o[1] = atomicAdd_system(o, 1);", "ATOMG"),
    "system_swap": ("int", "o[1] = atomicCAS_system(o, 1, 2);", "ATOMG.CAS"),
    "system_reduction": ("float", "atomicAdd_system(o, 1.f);", "RED"),
    "system_double": ("double", "o[1] = atomicAdd_system(o, 1.);", "ATOMG"),
    "system_generic": (
        "int",
        "__shared__ int s[8]; int* p = threadIdx.x ? s : o; o[1] = atomicAdd_system(p, 1); o[3] = atomicCAS_system(p, 2, 3);",
        "ATOM",
    ),
}
DEPENDENT: dict[str, tuple[str, str, str]] = {  # needs sm_90; the launcher decides what it may do
    "waits": ("int", 'asm volatile("griddepcontrol.wait;" ::: "memory"); o[0] = 1;', ""),
    "releases": (
        "int",
        'asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); o[0] = 1;',
        "",
    ),
}
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
Build = Callable[..., bytes]


def texts(bodies: dict[str, tuple[str, str, str]]) -> str:
    return "".join(
        KERNEL.format(name=name, kind=kind, body=body) for name, (kind, body, _) in bodies.items()
    )


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """(CUDA C++, architecture, further flags) -> cubin; each is compiled once."""
    folder, cubins = tmp_path_factory.mktemp("cubins"), {}

    def compile_text(text: str, arch: str = "sm_90a", *flags: str) -> bytes:
        key = (text, arch, flags)
        if key not in cubins:
            source: Path = folder / f"{len(cubins)}.cu"
            source.write_text(text)
            out = source.with_suffix(".cubin")
            subprocess.run(
                [str(NVCC), f"-arch={arch}", "-cubin", *flags, "-o", out, source],
                check=True,
                capture_output=True,
            )
            cubins[key] = out.read_bytes()
        return cubins[key]

    return compile_text


def plan(code: bytes, symbol: str = "honest", **change: object) -> Program:
    """A Program of one launch with one pointer."""
    launch = Launch("code", symbol, (1, 1, 1), 64, 0, (LaunchArg("ptr", Value(0)),))
    spec = TensorSpec("float32", (128,), (1,), "cuda")
    payload = torch.frombuffer(bytearray(code), dtype=torch.uint8)
    return Program(
        (), (Alloc(0, spec), replace(launch, **change)), (0,), payloads={"code": payload}
    )  # type: ignore[arg-type]


def only(checks: list[CheckResult]) -> CheckResult:
    (check,) = checks
    assert check.name == "cubin_scan"
    return check


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_misdeed_is_named_and_nothing_else(build: Build, arch: str) -> None:
    bodies = BODIES if arch == "sm_80" else BODIES | DEPENDENT
    misdeeds: dict[str, list[str]] = {name: [] for name in bodies}
    for line in list_impurities(inspect_cubin(build(texts(bodies), arch))):
        misdeed, _, place = line.rpartition(" at .text.")
        misdeeds[place.rpartition("+")[0]].append(misdeed)
    for name, (_, _, word) in bodies.items():
        assert bool(misdeeds[name]) == bool(word), (arch, name, misdeeds[name])
        assert any(word in misdeed for misdeed in misdeeds[name]) or not word, (
            arch,
            name,
            misdeeds[name],
        )


# pre-made instructions, so that the table is tested without a compiler: low half, high half, its
# description
WORDS = [
    (0x0000000000057805, 0x000FE40000005000, "CS2R reads SR_CLOCKLO"),
    (0x0000000000057805, 0x000FE40000015200, "CS2R reads SR_GLOBALTIMERLO"),
    (0x0000000000077919, 0x000E620000005100, "S2R reads SR_CLOCKHI"),
    (0x00000000000579C3, 0x000E620000005300, "S2UR reads SR_GLOBALTIMERHI"),
    (0x0000000000090805, 0x000FE40000005000, "CS2R reads SR_CLOCKLO"),  # under a predicate
    (0x0000000000077919, 0x000E220000002100, ""),  # S2R R7, SR_TID.X
    (0x00000000000579C3, 0x000E620000002500, ""),  # S2UR UR5, SR_CTAID.X
    (0x000000000000782E, 0x000FCA0000000000, ""),  # ACQBULK
    (0x0000000000007992, 0x000FEC000000B000, "MEMBAR of the system's scope"),
    (0x0000000000007992, 0x000FEC000000A000, ""),  # MEMBAR.ALL.GPU
    (0x00000000020709A8, 0x002EA200081F41C4, "ATOMG of the system's scope"),
    (0x00000000020709A8, 0x002EA200081EE1C4, ""),  # of the device's scope
    (0x0000000502007986, 0x000FE2000C101904, ""),  # STG.E
]


@pytest.mark.parametrize(("low", "high", "description"), WORDS)
def test_an_instruction_is_read_by_its_bits(low: int, high: int, description: str) -> None:
    code = low.to_bytes(8, "little") + high.to_bytes(8, "little")
    cubin = Cubin(90, (), (), (), (), ((".text.k", b"\0" * 16 + code),))
    assert list(list_impurities(cubin)) == (
        [f"{description} at .text.k+0x10"] if description else []
    )


HONEST = 'extern "C" __global__ void honest(float* o) { o[threadIdx.x] = 2.f * o[threadIdx.x + blockDim.x]; }\n'
SHARED = 'extern "C" __global__ void honest(float* o) { __shared__ float s[1024]; s[threadIdx.x] = *o; __syncthreads(); *o = s[0]; }\n'
MISDEEDS: dict[str, tuple[str, dict[str, object], tuple[str, ...], str]] = {
    "memory that outlives the call": (
        "__device__ int calls;\n" + HONEST.replace("o[", "calls++; o[", 1),
        {},
        (),
        ".nv.global",
    ),
    "an initialised global": (
        "__device__ int calls = 3;\n" + HONEST.replace("o[", "calls++; o[", 1),
        {},
        (),
        ".nv.global.init",
    ),
    "managed memory": (
        "__managed__ int calls;\n" + HONEST.replace("o[", "calls++; o[", 1),
        {},
        (),
        ".nv.global",
    ),
    "print": (
        "#include <cstdio>\n" + HONEST.replace("o[", 'printf("hello"); o[', 1),
        {},
        (),
        "vprintf",
    ),
    "memory of the device's heap": (
        HONEST.replace("o[", "o = (float*)malloc(99); o[", 1),
        {},
        (),
        "malloc",
    ),
    "a launch from the device": (
        HONEST.replace("honest", "inner") + HONEST.replace("o[", "inner<<<1, 64>>>(o); o[", 1),
        {},
        ("-rdc=true",),
        "cudaCDP",
    ),
    "a kernel that is never launched": (
        HONEST + HONEST.replace("honest", "spare"),
        {},
        (),
        "'spare', which the plan never launches",
    ),
    "a clock": (HONEST.replace("o[", "o[0] = clock(); o[", 1), {}, (), "SR_CLOCKLO"),
    "a symbol that is not there": (HONEST, {"symbol": "other"}, (), "no kernel 'other'"),
    "an argument too many": (
        HONEST,
        {"args": (LaunchArg("ptr", Value(0)), LaunchArg("null"))},
        (),
        "takes parameters",
    ),
    "more shared memory than a block has": (
        SHARED,
        {"shared_bytes": 230_000},
        (),
        "static shared memory",
    ),
}


@needs_nvcc
@pytest.mark.parametrize("name", MISDEEDS)
def test_code_that_is_no_pure_function_is_refused(build: Build, name: str) -> None:
    text, change, flags, word = MISDEEDS[name]
    check = only(cubin_scan(plan(build(text, "sm_90a", *flags), **change), 90))
    assert not check.passed
    assert word in check.detail, check.detail


@needs_nvcc
def test_code_for_another_device_is_refused(build: Build) -> None:
    check = only(cubin_scan(plan(build(HONEST, "sm_80")), 90))
    assert not check.passed
    assert "sm_80" in check.detail


@needs_nvcc
def test_more_registers_than_a_block_has_are_refused(build: Build) -> None:
    heavy = "".join(f"float v{i} = o[threadIdx.x + {i}]; " for i in range(120))
    store = "__syncthreads(); " + "".join(f"o[threadIdx.x * {i} + 1] = v{i}; " for i in range(120))
    code = build(f'extern "C" __global__ void honest(float* o) {{ {heavy}{store} }}')
    assert inspect_cubin(code).kernels[0].registers > 64
    assert only(cubin_scan(plan(code), 90)).passed
    check = only(cubin_scan(plan(code, block=1024), 90))
    assert not check.passed
    assert "registers" in check.detail


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("text", [HONEST, SHARED], ids=["plain", "shared memory"])
def test_an_honest_kernel_passes(build: Build, text: str, arch: str) -> None:
    check = only(cubin_scan(plan(build(text, arch))))
    assert check.passed, check.detail
    assert check.value == 1.0


def test_a_program_without_machine_code_is_not_concerned() -> None:
    check = only(cubin_scan(Program((), (), ())))
    assert check.passed
    assert "not applicable" in check.detail


@pytest.mark.parametrize(
    "code",
    [b"", b"\x7fELF", b"\x7fELF\x02\x01\x01" + b"\0" * 80, b".version 8.0\n"],
    ids=["empty", "magic", "zeros", "ptx"],
)
def test_what_is_no_cubin_is_refused(code: bytes) -> None:
    assert not only(cubin_scan(plan(code or b"\0"))).passed
