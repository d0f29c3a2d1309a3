"""A cubin tells its parameters without a GPU, misfits and impure machine code are refused, and no
bytes crash the reader.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.device.cuda.cubin import PARAM_BYTES, Cubin, check_launch, inspect_cubin
from torch_cudal1.ir.program import Launch, LaunchArg, Value

triton = pytest.importorskip("triton", reason="cubins are compiled with Triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

ARCHITECTURES = (80, 90, 100)


@triton.jit
def add_kernel(x, y, out, n, wide, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, inside) + tl.load(y + at, inside) * scale
    tl.store(out + at + wide, value, inside)


@triton.jit
def print_kernel(x, out, BLOCK: tl.constexpr):
    value = tl.load(x + tl.arange(0, BLOCK))
    tl.device_print("value", value)
    tl.store(out + tl.arange(0, BLOCK), value)


@triton.jit
def dot_kernel(a, b, out, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    at = rows[:, None] * BLOCK + rows[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


KERNELS = {
    "add": (
        add_kernel,
        {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "wide": "i64", "scale": "fp32"},
        128,
    ),
    "print": (print_kernel, {"x": "*fp32", "out": "*fp32"}, 128),
    "dot": (dot_kernel, {"a": "*fp16", "b": "*fp16", "out": "*fp32"}, 64),
}
POINTERS = tuple(LaunchArg("ptr", Value(i)) for i in range(3))
HIDDEN = (LaunchArg("null"), LaunchArg("null"))  # Triton appends global and profile scratch
ADD = Launch(
    payload="p",
    symbol="add_kernel",
    grid=(4, 1, 1),
    block=128,
    shared_bytes=0,
    args=(*POINTERS, LaunchArg("i32", 500), LaunchArg("i64", 0), LaunchArg("fp32", 2.0), *HIDDEN),
)

Build = Callable[..., bytes]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """(kernel name, sm, options) -> cubin, compiled here without a GPU."""
    cubins: dict[tuple[object, ...], bytes] = {}

    def compile_kernel(name: str, sm: int, **options: int) -> bytes:
        key = (name, sm, *sorted(options.items()))
        if key not in cubins:
            function, signature, block = KERNELS[name]
            source = ASTSource(function, signature | {"BLOCK": "constexpr"}, {"BLOCK": block})
            cubins[key] = triton.compile(
                source, target=GPUTarget("cuda", sm, 32), options=options
            ).asm["cubin"]
        return cubins[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield compile_kernel


@pytest.fixture(scope="module")
def add_90(build: Build) -> bytes:
    return build("add", 90)


def check_refused(image: bytes, launch: Launch = ADD, sm: int = 90) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        check_launch(inspect_cubin(image), launch, sm)
    return caught.value


def section_header(image: bytes, name: bytes) -> int:
    """Offset of the 64-byte header of section `name`."""
    (start,), (count, names_at) = (
        struct.unpack_from("<Q", image, 40),
        struct.unpack_from("<HH", image, 60),
    )
    (table,) = struct.unpack_from("<Q", image, start + names_at * 64 + 24)
    for at in range(start, start + count * 64, 64):
        (offset,) = struct.unpack_from("<I", image, at)
        if image[table + offset : table + offset + len(name) + 1] == name + b"\0":
            return at
    raise LookupError(name)


def patch_bytes(image: bytes, offset: int, layout: str, *values: int) -> bytes:
    changed = bytearray(image)
    struct.pack_into(layout, changed, offset, *values)
    return bytes(changed)


# What is read
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_parameters_block_and_architecture_are_read(build: Build, sm: int) -> None:
    cubin = inspect_cubin(build("add", sm))
    (kernel,) = cubin.kernels
    assert cubin.sm == sm
    assert (kernel.symbol, kernel.param_sizes) == ("add_kernel", (8, 8, 8, 4, 8, 4, 8, 8))
    assert (kernel.required_block, kernel.cluster) == ((128, 1, 1), None)
    assert 8 <= kernel.registers <= 255
    assert kernel.stack_bytes == 0
    assert (cubin.undefined_functions, cubin.writable_globals, cubin.constant_sections) == (
        (),
        (),
        (),
    )
    assert check_launch(cubin, ADD, sm) is kernel


@pytest.mark.parametrize("warps", [1, 2, 8])
def test_the_required_block_follows_the_warps(build: Build, warps: int) -> None:
    (kernel,) = inspect_cubin(build("add", 90, num_warps=warps)).kernels
    assert kernel.required_block == (32 * warps, 1, 1)


@pytest.mark.parametrize("sm", [90, 100])
def test_a_cluster_is_read(build: Build, sm: int) -> None:
    cubin = inspect_cubin(build("dot", sm, num_ctas=2))
    assert cubin.kernels[0].cluster == (2, 1, 1)
    assert cubin.undefined_functions == ()


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_a_tensor_core_kernel_with_shared_memory_is_pure(build: Build, sm: int) -> None:
    launch = Launch("p", "dot_kernel", (1, 1, 1), 128, 16384, (*POINTERS, *HIDDEN))
    assert check_launch(inspect_cubin(build("dot", sm)), launch, sm).registers > 0


def test_parameter_sizes_cover_every_argument_kind() -> None:
    assert set(PARAM_BYTES) == {"ptr", "null", "i32", "i64", "fp32"}


# What is refused
# ---------------------------------------------------------------------------------------------------------------

MISFITS: dict[str, tuple[Launch, str, str]] = {
    "no such kernel": (dataclasses.replace(ADD, symbol="sub_kernel"), "cubin_symbol", "add_kernel"),
    "a parameter too few": (
        dataclasses.replace(ADD, args=ADD.args[:-1]),
        "cubin_params",
        "(8, 8, 8, 4, 8, 4, 8, 8)",
    ),
    "a parameter too many": (
        dataclasses.replace(ADD, args=(*ADD.args, HIDDEN[0])),
        "cubin_params",
        "bytes",
    ),
    "no parameter": (dataclasses.replace(ADD, args=()), "cubin_params", "plan has ()"),
    "sizes swapped": (
        dataclasses.replace(ADD, args=(*ADD.args[:3], ADD.args[4], ADD.args[3], *ADD.args[5:])),
        "cubin_params",
        "(8, 8, 8, 8, 4, 4, 8, 8)",
    ),
    "unknown kind": (
        dataclasses.replace(ADD, args=(LaunchArg("fp128", 1.0), *ADD.args[1:])),
        "cubin_params",
        "fp128",
    ),
    "another block": (dataclasses.replace(ADD, block=256), "cubin_block", "(128, 1, 1)"),
    "a cluster": (dataclasses.replace(ADD, cluster=2), "cubin_cluster", "(1, 1, 1)"),
}


@pytest.mark.parametrize(("launch", "rule", "text"), MISFITS.values(), ids=MISFITS)
def test_a_launch_that_does_not_fit_is_refused(
    add_90: bytes, launch: Launch, rule: str, text: str
) -> None:
    error = check_refused(add_90, launch)
    assert error.rule == rule
    assert text in error.found


@pytest.mark.parametrize(
    ("built", "device"), [(80, 86), (80, 90), (90, 100), (100, 90), (100, 103)]
)
def test_machine_code_for_another_architecture_is_refused(
    build: Build, built: int, device: int
) -> None:
    error = check_refused(build("add", built), sm=device)
    assert error.rule == "cubin_sm"
    assert f"sm_{built}" in error.found
    assert f"sm_{device}" in error.found


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_a_kernel_that_calls_the_device_runtime_is_refused(build: Build, sm: int) -> None:
    image = build("print", sm)
    assert inspect_cubin(image).undefined_functions == ("vprintf",)
    assert ".nv.global.init" in inspect_cubin(image).writable_globals
    error = check_refused(
        image, Launch("p", "print_kernel", (1, 1, 1), 128, 0, (*POINTERS[:2], *HIDDEN)), sm
    )
    assert error.rule == "cubin_scan"
    assert "vprintf" in error.found


def test_writable_memory_is_refused_by_its_name(add_90: bytes) -> None:
    named = add_90.replace(b".nv.callgraph\0", b".nv.global\0\0\0\0")
    error = check_refused(named)
    assert error.rule == "cubin_scan"
    assert ".nv.global" in error.found


def test_writable_memory_is_refused_by_its_flag(add_90: bytes) -> None:
    error = check_refused(
        patch_bytes(add_90, section_header(add_90, b".nv.callgraph") + 8, "<Q", 3)
    )
    assert error.rule == "cubin_scan"
    assert ".nv.callgraph" in error.found


def test_a_cluster_that_the_plan_lacks_is_refused(build: Build) -> None:
    launch = Launch("p", "dot_kernel", (1, 1, 1), 128, 0, (*POINTERS, *HIDDEN))
    assert check_refused(build("dot", 90, num_ctas=2), launch).rule == "cubin_cluster"


# Hostile bytes
# -----------------------------------------------------------------------------------------------------------------

BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda image: b"",
    "PTX": lambda image: b".version 8.7\n.target sm_90a\n",
    "32-bit": lambda image: image[:4] + b"\x01" + image[5:],
    "another ABI": lambda image: image[:7] + b"\x00" + image[8:],
    "another machine": lambda image: patch_bytes(image, 18, "<H", 62),
    "headers beyond the end": lambda image: patch_bytes(image, 40, "<Q", len(image)),
    "headers at 2**64 - 1": lambda image: patch_bytes(image, 40, "<Q", 2**64 - 1),
    "65535 sections": lambda image: patch_bytes(image, 60, "<H", 65535),
    "no sections": lambda image: patch_bytes(image, 60, "<HH", 0, 0),
    "names in a section that is not there": lambda image: patch_bytes(image, 62, "<H", 999),
    "symbols beyond the end": lambda image: patch_bytes(
        image, section_header(image, b".symtab") + 24, "<Q", 2**63
    ),
    "symbols of odd size": lambda image: patch_bytes(
        image, section_header(image, b".symtab") + 32, "<Q", 25
    ),
    "symbol names elsewhere": lambda image: patch_bytes(
        image, section_header(image, b".symtab") + 40, "<I", 10**6
    ),
    "two symbol tables": lambda image: patch_bytes(
        image, section_header(image, b".strtab") + 4, "<I", 2
    ),
    "kernel info cut": lambda image: patch_bytes(
        image, section_header(image, b".nv.info.add_kernel") + 32, "<Q", 17
    ),
    "kernel info gone": lambda image: patch_bytes(
        image, section_header(image, b".nv.info.add_kernel"), "<I", 0
    ),
    "kernel info twice": lambda image: patch_bytes(
        image,
        section_header(image, b".nv.callgraph"),
        "<I",
        *struct.unpack_from("<I", image, section_header(image, b".nv.info.add_kernel")),
    ),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_broken_bytes_are_refused(add_90: bytes, damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ProgramError) as caught:
        inspect_cubin(damage(add_90))
    assert caught.value.rule == "cubin"


def test_sections_that_overlap_without_end_do_not_fill_the_memory(add_90: bytes) -> None:
    header = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 0, 1 << 20, 0, 0, 0, 0)
    big = patch_bytes(
        add_90 + b"\0" * (1 << 20) + header * 60_000, 40, "<Q", len(add_90) + (1 << 20)
    )
    with pytest.raises(ProgramError, match="sections of"):
        inspect_cubin(patch_bytes(big, 60, "<HH", 60_000, 0))


def scan(image: bytes) -> Cubin | ProgramError:
    """What the reader makes of `image`; anything else it raises fails the test."""
    try:
        cubin = inspect_cubin(image)
        check_launch(cubin, ADD, 90)
    except ProgramError as error:
        return error
    return cubin


def test_every_truncation_is_refused(add_90: bytes) -> None:
    assert isinstance(scan(add_90), Cubin)
    (start,), (count,) = struct.unpack_from("<Q", add_90, 40), struct.unpack_from("<H", add_90, 60)
    for size in range(0, start + count * 64, 7):
        assert isinstance(scan(add_90[:size]), ProgramError), size


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_random_bytes_behind_the_magic_are_refused(tail: bytes) -> None:
    assert isinstance(scan(b"\x7fELF\x02\x01\x01\x33" + tail), ProgramError)


@given(
    changes=st.lists(
        st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8
    ),
    sm=st.sampled_from((90, 100)),
)
@settings(max_examples=400, deadline=None)
def test_changed_bytes_never_crash_the_reader(
    build: Build, changes: list[tuple[int, int]], sm: int
) -> None:
    image = bytearray(build("add", sm))
    for place, value in changes:
        image[place % len(image)] = value
    assert isinstance(scan(bytes(image)), (Cubin, ProgramError))


@given(
    words=st.lists(
        st.tuples(st.integers(0, 1 << 10), st.sampled_from((0, 1, 255, 2**31, 2**32 - 1))),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=400, deadline=None)
def test_absurd_header_fields_never_crash_the_reader(
    add_90: bytes, words: list[tuple[int, int]]
) -> None:
    image = bytearray(add_90)
    (start,) = struct.unpack_from("<Q", image, 40)
    fields = [*range(40, 64, 4), *range(start, len(image) - 3, 4)]
    for place, value in words:
        struct.pack_into("<I", image, fields[place % len(fields)], value)
    assert isinstance(scan(bytes(image)), (Cubin, ProgramError))
