"""Tensors that pass through shared memory arrive as they were; places outside it, and messages
without it, are refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.sandbox.limits import make_limits
from torch_cudal1.judge.wire import arena
from torch_cudal1.judge.wire.arena import (
    Arena,
    Verbs,
    find_arena,
    lend,
    lend_also,
    return_to_first,
    withdraw,
)
from torch_cudal1.judge.wire.channel import lies_in_arena, load_tensors, save_tensors
from torch_cudal1.judge.wire.tensor_bits import same_storage
from torch_cudal1.judge.worker.raw_copy import RefusedOutput, save_raw_tensors

CPU = torch.device("cpu")
SIZE = 1 << 16
TENSORS = [
    torch.randn(3, 4).t(),
    torch.randn(4).expand(3, 4),
    torch.randn(10)[3:9:2],
    torch.tensor(1.5),
    torch.empty(0, 3),
    None,
    torch.tensor([True, False]),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).bfloat16(),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for which memory of the host is lent."""
    buffer = (ctypes.c_char * SIZE)()
    verbs = Verbs(ctypes.memmove, lambda: None, lambda: None)
    lend(tmp_path, Arena(CPU, ctypes.addressof(buffer), SIZE, verbs))
    yield tmp_path
    withdraw(tmp_path)


@pytest.mark.parametrize("save", [save_tensors, save_raw_tensors])
def test_tensors_of_every_layout_arrive_without_a_file(folder: Path, save: type) -> None:
    layout = save(TENSORS, folder / "message")
    assert lies_in_arena(layout)
    assert not (folder / "message").exists()
    for old, new in zip(TENSORS, load_tensors(layout, folder / "message", CPU), strict=True):
        if old is None or new is None:
            assert old is new
            continue
        assert torch.equal(old, new)
        assert TensorSpec.of(old) == TensorSpec.of(new)


def test_a_tensor_that_was_read_is_a_copy(folder: Path) -> None:
    layout = save_tensors([torch.ones(8)], folder / "first")
    (first,) = load_tensors(layout, folder / "first", CPU)
    save_tensors([torch.zeros(8)], folder / "second")
    assert first is not None
    assert first.tolist() == [1.0] * 8


def test_a_message_that_does_not_fit_goes_through_a_file(folder: Path) -> None:
    large = torch.randn(SIZE)
    layout = save_tensors([large], folder / "message")
    assert not lies_in_arena(layout)
    (back,) = load_tensors(layout, folder / "message", CPU)
    assert back is not None
    assert torch.equal(large, back)


@pytest.mark.parametrize("offset", [-1, SIZE - 3, 1 << 62])
def test_a_place_outside_is_refused(folder: Path, offset: int) -> None:
    with pytest.raises(SandboxError, match="shared"):
        load_tensors([["float32", [1], [1], offset]], folder / "message", CPU)


@pytest.mark.parametrize("shape", [[1 << 40], [-1]])
def test_a_tensor_that_cannot_lie_there_is_refused(folder: Path, shape: list[int]) -> None:
    with pytest.raises(SandboxError):
        load_tensors([["float32", shape, [1], 0]], folder / "message", CPU)


def test_without_shared_memory_such_a_message_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no memory is shared"):
        load_tensors([["float32", [1], [1], 0]], tmp_path / "message", CPU)


def test_an_output_larger_than_its_storage_is_refused_here_too(folder: Path) -> None:
    lying = torch.ones(4)
    lying.untyped_storage().resize_(4)
    with pytest.raises(RefusedOutput, match="its storage has"):
        save_raw_tensors([lying], folder / "message")


def test_a_larger_arena_replaces_the_first_until_it_is_returned(folder: Path) -> None:
    large = torch.randn(SIZE)
    given_back: list[int] = []
    buffer = (ctypes.c_char * (8 * SIZE))()
    first = find_arena(folder)
    for ended in (return_to_first, withdraw):
        verbs = Verbs(ctypes.memmove, lambda: None, lambda: given_back.append(1))
        lend_also(folder, Arena(CPU, ctypes.addressof(buffer), 8 * SIZE, verbs))
        layout = save_tensors([large], folder / "message")
        assert lies_in_arena(layout)
        (back,) = load_tensors(layout, folder / "message", CPU)
        assert back is not None
        assert torch.equal(back, large)
        ended(folder)
        assert find_arena(folder) is (first if ended is return_to_first else None)
    assert given_back == [1, 1]
    return_to_first(folder)  # of none: nothing to do


def test_without_a_gpu_there_is_no_room_to_be_had() -> None:
    with Child(make_limits(Settings(), CPU), Contract()) as child, child.enlarge_arena(1 << 40):
        path = child.reserve_file()
        child.call(
            "put", name="set", layout=save_tensors([torch.ones(3)], path), path=str(path), base=""
        )


def test_a_message_for_which_a_gpu_has_no_room_goes_through_a_file_unless_that_takes_minutes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested_sizes: list[int] = []

    def share(size_bytes: int, device: torch.device) -> Arena:
        requested_sizes.append(size_bytes)
        raise SandboxError("sharing memory of the GPU", "cuMemAlloc_v2 answered 2")

    monkeypatch.setattr(arena, "share", share)
    with Child(make_limits(Settings(), CPU), Contract()) as child:
        lend(child.scratch, find_arena(folder))  # as if its device had such memory
        path = child.reserve_file()
        with child.enlarge_arena(1 << 30):
            layout = save_tensors([torch.randn(SIZE)], path)
            child.call("put", name="set", layout=layout, path=str(path), base="")
        assert (
            requested_sizes == [1 << 30] * 2
        )  # the second time after PyTorch gave back what it had kept
        with (
            pytest.raises(
                CandidateFailure, match=r"no room for a message of 6\.0 GiB: cuMemAlloc"
            ) as failed,
            child.enlarge_arena(6 << 30),
        ):
            raise AssertionError("the body must not run")
        assert failed.value.detector == "resource"
        assert child.usable


def assert_same_on_both_sides(child: Child, value: torch.Tensor) -> None:
    """The child's set has the value's bytes."""
    path = child.reserve_file()
    layout = child.call("reread", name="set", positions=[0], path=str(path))["layout"]
    (tensor,) = load_tensors(layout, path, value.device)
    assert tensor is not None
    assert same_storage(value, tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_message_too_large_for_the_standing_arena_gets_room_for_its_time() -> None:
    device = torch.device("cuda")
    with Child(make_limits(Settings(), device), Contract(), shared_bytes=1 << 20) as child:
        standing = find_arena(child.scratch)
        value = torch.randn(3 << 20, device=device)
        for _ in range(3):
            path = child.reserve_file()
            with child.enlarge_arena(value.nbytes + 512):
                layout = save_tensors([value], path)
                assert lies_in_arena(layout)
                child.call("put", name="set", layout=layout, path=str(path), base="")
            assert find_arena(child.scratch) is standing
        with child.enlarge_arena(value.nbytes + 512):
            assert_same_on_both_sides(child, value)
        small = child.reserve_file()
        child.call(
            "put",
            name="small",
            layout=save_tensors([torch.ones(4, device=device)], small),
            path=str(small),
            base="",
        )
        with pytest.raises(CandidateFailure, match="no room"), child.enlarge_arena(1 << 60):
            raise AssertionError("nobody has that much")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_child_on_a_gpu_reads_and_writes_memory_that_the_judge_shares() -> None:
    device = torch.device("cuda")
    with Child(make_limits(Settings(), device), Contract(), shared_bytes=1 << 20) as child:
        assert find_arena(child.scratch) is not None, (
            "the driver shares no memory between these processes"
        )
        value = torch.randn(100, 30, device=device).t()
        path = child.reserve_file()
        layout = save_tensors([value], path)
        assert lies_in_arena(layout)
        child.call("put", name="set", layout=layout, path=str(path), base="")
        save_tensors([torch.zeros(4, device=device)], path)  # the set is a copy
        assert_same_on_both_sides(child, value)
        scratch = child.scratch
    assert find_arena(scratch) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_constants_that_a_module_has_on_the_gpu_are_read_on_the_host() -> None:
    """As a Program's binaries are: an address of the host is none for the driver's copy, and
    SwinTransformerV2 was not timed.
    """
    device = torch.device("cuda")
    with Child(make_limits(Settings(), device), Contract(), shared_bytes=1 << 20) as child:
        path, constant = child.reserve_file(), torch.arange(12.0, device=device).view(3, 4).t()
        layout = save_tensors([constant, None], path)
        assert lies_in_arena(layout)
        constants, missing = load_tensors(layout, path, CPU)
    assert missing is None
    assert constants is not None
    assert constants.device == CPU
    assert TensorSpec.of(constants) == TensorSpec.of(constant.cpu())
    assert torch.equal(constants, constant.cpu())
