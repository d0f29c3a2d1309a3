# ruff: noqa: F811  fixtures of another file are arguments here
"""A captured graph becomes a line of kernels: copies of any size, captured fills and captured
copies keep effect and order.

Without a GPU the driver is `test_driver`'s recording library, which runs a graph's nodes as late as
their dependencies allow.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.test_cubin import build  # noqa: F401  (fixtures, here and below)
from tests.device.test_driver import add, cuda, number, recorder_path  # noqa: F401
from tests.runtime.test_cuda_graph import graph_runner, needs_extension  # noqa: F401
from torch_cudal1.device.cuda.copy_kernels import WIDTHS, ptx
from torch_cudal1.device.cuda.cubin import inspect_cubin
from torch_cudal1.runtime.cuda_graph import GraphedRunner


@needs_extension
@pytest.mark.parametrize("size", [1, 12, 16, 4096, 4097])
def test_copies_of_any_size_and_alignment_are_whole(graph_runner, cuda, size):
    echo = graph_runner.make(lambda inputs: [inputs[0] ^ 0x55])
    for offset in (0, 1, 4, 8, 16):
        source = torch.randint(256, (size + offset,), dtype=torch.uint8)[offset:]
        assert torch.equal(echo([source])[0], source ^ 0x55)
    assert (number(cuda, "copies"), len(graph_runner.bodies)) == (0, 1)


@needs_extension
def test_what_is_large_is_copied_by_the_device_s_own_copies(graph_runner, cuda):
    large = graph_runner.make(lambda inputs: [inputs[0] + 1, inputs[1] + 1])
    sources = [torch.zeros((4 << 20) + 1, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)]
    for copied, source in zip(large(sources), sources, strict=True):
        assert torch.equal(copied, source + 1)
    assert (number(cuda, "copies"), number(cuda, "replays")) == (2, 1)


class Fill(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("to", "pitch")),
        *((name, ctypes.c_uint) for name in ("value", "element")),
        *((name, ctypes.c_uint64) for name in ("width", "height")),
    )


FILLS = {  # element bytes, value, elements, offset, rows, does it stay a fill
    "bytes": (1, 0xAB, 3, 1, 1, False),
    "words": (4, 0x01020304, 64, 0, 1, False),
    "halves": (2, 0x0102, 6, 4, 1, False),
    "halves at a place for bytes": (2, 0x0102, 3, 2, 1, True),
    "zeros at a place for bytes": (2, 0, 3, 2, 1, False),
    "rows": (4, 0, 4, 0, 2, True),
}


@needs_extension
@pytest.mark.parametrize("name", FILLS)
def test_captured_fills_become_kernels_where_one_can_do_it(graph_runner, cuda, name):
    element, value, count, offset, rows, stays = FILLS[name]
    scratch = torch.empty(512, dtype=torch.uint8)
    place = scratch[offset : offset + element * count]
    captured = Fill.in_dll(cuda.library, "captured_fill")
    captured.to, captured.value, captured.element = place.data_ptr(), value, element
    captured.width, captured.height = count, rows
    summed = graph_runner.make(lambda inputs: [inputs[0] + scratch.sum()])
    expected = sum(value.to_bytes(element, "little")) * count
    for _ in range(2):
        scratch.fill_(7)
        x = torch.randint(100, (4,))
        assert torch.equal(summed([x])[0], x + expected + 7 * (512 - element * count))
    assert cuda.library.nodes_of_other_kinds() == (2 if stays else 0)
    assert (number(cuda, "nodes_gone"), number(cuda, "copies")) == (
        0 if stays else number(cuda, "graphs_made"),
        0,
    )


@needs_extension
def test_kernels_that_begin_before_those_ahead_have_ended_keep_their_order(graph_runner, cuda):
    ctypes.c_int.in_dll(cuda.library, "early_edges").value = 1
    ctypes.c_int.in_dll(cuda.library, "captured_kernels").value = 3
    echo = graph_runner.make(lambda inputs: [inputs[0] + 1])
    for _ in range(2):
        x = torch.randint(100, (4,))
        assert torch.equal(echo([x])[0], x + 1)
    # Copies around the graph are nodes of it, as they are without such kernels.
    assert number(cuda, "copies") == 0


@needs_extension
@pytest.mark.parametrize(("kind", "stays"), [(2, False), (1, True)])
def test_captured_copies_within_the_device_become_kernels(graph_runner, cuda, kind, stays):
    source, scratch = torch.arange(40.0), torch.zeros(40)
    words = (ctypes.c_uint64 * 25).in_dll(
        cuda.library, "captured_copy"
    )  # CUDA_MEMCPY3D: type and address at 4 and 6, 15 and 17
    words[4], words[6], words[15], words[17] = kind, source.data_ptr(), 2, scratch.data_ptr()
    words[22], words[23], words[24] = 160, 1, 1
    doubled = graph_runner.make(lambda inputs: [inputs[0] + scratch])
    for _ in range(2):
        source.add_(1)
        assert torch.equal(doubled([torch.ones(40)])[0], source + 1)
    assert (cuda.library.nodes_of_other_kinds() > 0) == stays


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_the_kernels_assemble_and_there_is_one_for_every_width(sm, tmp_path):
    assembler = (
        Path(pytest.importorskip("triton").__file__).parent
        / "backends"
        / "nvidia"
        / "bin"
        / "ptxas"
    )
    if not assembler.exists():
        pytest.skip("this Triton brings no ptxas")
    (tmp_path / "movers.ptx").write_text(ptx())
    command = [
        assembler,
        f"-arch=sm_{sm}",
        "--warning-as-error",
        "-o",
        tmp_path / "movers.cubin",
        tmp_path / "movers.ptx",
    ]
    subprocess.run(command, check=True)
    inspected = inspect_cubin((tmp_path / "movers.cubin").read_bytes())
    assert {kernel.symbol for kernel in inspected.kernels} == {
        f"cudal1_{operation}{width}" for operation in ("copy", "fill") for width in WIDTHS
    }
    assert {kernel.param_sizes for kernel in inspected.kernels} == {(8, 8, 8)}


# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("size", [1, 24, 33, 4096, 1 << 22])
def test_fills_and_copies_inside_and_around_a_graph_are_right_on_the_device(size):
    run = GraphedRunner(_fill_and_copy, frozenset(), torch.device("cuda", 0))
    with torch.inference_mode():
        for call in range(6):
            x = torch.randint(-100, 100, (size + 3,), device="cuda", dtype=torch.int8)[
                call % 4 : call % 4 + size
            ]
            results = run([x])
            for result, expected in zip(results, _fill_and_copy([x]), strict=True):
                assert torch.equal(result, expected)  # type: ignore[arg-type]


def _fill_and_copy(inputs: Any) -> list[torch.Tensor | None]:
    """A fill of a buffer that the last replay left dirty, a fill with ones, and a copy, each of
    which a capture takes as such.
    """
    (x,) = inputs
    total, copied = torch.empty_like(x), torch.empty_like(x)
    total.zero_()
    total.add_(x)
    copied.copy_(x)
    copied.mul_(2)
    return [total, copied, x.clone()]
