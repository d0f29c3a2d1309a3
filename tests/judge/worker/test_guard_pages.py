"""Beyond a tensor at the edge there is no memory; operators of PyTorch never notice, for they stay
within their tensors.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from torch_cudal1.judge.wire.tensor_bits import same_bits
from torch_cudal1.judge.worker.guard_pages import SIDES, Side, copy_to_edge

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
        ],
    ),
]
FORMS = {
    "a page's multiple": torch.randn(64, 64),
    "an odd size": torch.randn(7),
    "a byte": torch.tensor([True]),
    "transposed, with an offset": torch.randn(6, 5).t()[1:],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "many pages": torch.randn(70_001, dtype=torch.float64),
}
# what is done with a tensor of 4096 float32 at address `at`, on which side of it no memory is, and
# whether that is fatal
ACCESSES: dict[str, tuple[str, Side, bool]] = {
    "all of it is read": ("ctypes.string_at(at, 16384)", "end", False),
    "all of it is written": ("ctypes.memset(at, 0, 16384)", "start", False),
    "a byte behind it is read": ("ctypes.string_at(at + 16384, 1)", "end", True),
    "a byte before it is read": ("ctypes.string_at(at - 1, 1)", "start", True),
    "a byte behind it is written": ("ctypes.memset(at + 16384, 0, 1)", "end", True),
    "a byte before it is written": ("ctypes.memset(at - 1, 0, 1)", "start", True),
    "a byte a megabyte behind it is read": (
        "ctypes.string_at(at + 16384 + (1 << 20), 1)",
        "start",
        True,
    ),
}
PROGRAM = """
import ctypes
import torch
from torch_cudal1.judge.worker.guard_pages import copy_to_edge
tensor = copy_to_edge(torch.ones(4096), {side!r})
at = tensor.data_ptr()
{access}
"""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_at_the_edge_is_the_same_tensor(form: str, side: Side, device: str) -> None:
    tensor = FORMS[form].to(device)
    moved = copy_to_edge(tensor, side)
    assert same_bits(moved, tensor)
    assert moved.stride() == tensor.stride()
    assert moved.data_ptr() % 16 == 0
    assert moved.device == tensor.device
    assert moved.data_ptr() != tensor.data_ptr()


def test_an_empty_tensor_has_no_edge() -> None:
    empty = torch.empty(0, 3)
    assert copy_to_edge(empty, "end") is empty


@pytest.mark.parametrize("name", ACCESSES)
def test_an_access_beyond_the_edge_ends_the_process(name: str) -> None:
    access, side, fatal = ACCESSES[name]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(side=side, access=access)],
        capture_output=True,
        timeout=120,
    )
    assert (ended.returncode != 0) == fatal, ended.stderr.decode()[-300:]


def test_the_memory_goes_with_the_tensor() -> None:
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    tensors = [copy_to_edge(torch.ones(1000), "end") for _ in range(20)]
    view = tensors[0][10:20]
    assert mappings() > before + 20
    del tensors
    assert view.sum() == 10
    del view
    assert mappings() <= before + 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_memory_of_a_gpu_goes_with_the_tensor() -> None:
    def free() -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def sees_memory_taken_and_given_back() -> bool:
        before = free()
        tensors = [copy_to_edge(torch.ones(1 << 24, device="cuda"), "end") for _ in range(4)]
        taken = before - free()
        del tensors
        return taken >= 4 * (1 << 26) and before - free() < 1 << 26

    copy_to_edge(torch.ones(1, device="cuda"), "end")
    # The driver counts the whole GPU, and another process may take or free memory in between.
    assert any(sees_memory_taken_and_given_back() for _ in range(20))


OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "matmul": (torch.matmul, ((17, 65), (65, 33))),
    "matrix times vector": (torch.matmul, ((129, 31), (31,))),
    "linear": (F.linear, ((3, 7), (5, 7), (5,))),
    "batched matmul": (torch.bmm, ((3, 5, 7), (3, 7, 11))),
    "convolution": (F.conv2d, ((2, 3, 17, 15), (8, 3, 3, 3))),
    "pointwise convolution": (F.conv2d, ((2, 7, 5, 3), (9, 7, 1, 1))),
    "convolution in 1D": (F.conv1d, ((2, 5, 33), (7, 5, 3))),
    "transposed convolution": (F.conv_transpose2d, ((1, 3, 7, 7), (3, 5, 3, 3))),
    "softmax": (lambda x: torch.softmax(x, -1), ((5, 129),)),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[-1:]), ((7, 33),)),
    "sum": (lambda x: x.sum(-1), ((3, 4097),)),
    "sort": (lambda x: x.sort(-1).values, ((3, 37),)),
    "gelu": (F.gelu, ((1001,),)),
    "max pooling": (lambda x: F.max_pool2d(x, 3, 2), ((2, 3, 9, 11),)),
    "attention": (F.scaled_dot_product_attention, ((2, 3, 33, 40), (2, 3, 33, 40), (2, 3, 33, 40))),
    "copy of a transposed matrix": (lambda x: x.t().contiguous(), ((31, 17),)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_stay_within_their_tensors(name: str, dtype: torch.dtype, device: str) -> None:
    operator, shapes = OPERATORS[name]
    inputs = [torch.randn(shape).to(device, dtype) for shape in shapes]
    expected = operator(*inputs)
    for side, read_only in (*((side, False) for side in SIDES), ("end", True)):
        problem = operator(
            *[copy_to_edge(tensor, side, read_only=read_only) for tensor in inputs]
        )  # a process that is still there says it
        torch.testing.assert_close(problem, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("access", "is_fatal"),
    [("ctypes.string_at(at, 16384)", False), ("ctypes.memset(at + 8000, 0, 1)", True)],
)
def test_pages_that_are_read_only_can_be_read(access: str, *, is_fatal: bool) -> None:
    program = PROGRAM.format(side="end", access=access).replace("'end')", "'end', read_only=True)")
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert (ended.returncode < 0) is is_fatal
    assert ended.returncode in (0, -11)


GPU_PROGRAM = """
import torch
from torch_cudal1.judge.worker.guard_pages import copy_to_edge
tensor = copy_to_edge(torch.ones(4096, device="cuda"), "end", read_only=True)
assert tensor.sum().item() == 4096
{access}
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize(
    ("access", "is_fatal"), [("(tensor * 2).sum()", False), ("tensor.data.add_(1)", True)]
)
def test_pages_of_a_gpu_that_are_read_only_can_be_read(access: str, *, is_fatal: bool) -> None:
    program = GPU_PROGRAM.format(access=access)
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode != 0) is is_fatal
    assert ("illegal memory access" in ended.stderr) is is_fatal
