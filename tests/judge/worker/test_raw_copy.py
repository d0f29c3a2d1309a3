"""Outputs are copied byte by byte, and those that wait or lie about their storage are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_cudal1.judge.wire.channel import load_tensors, save_tensors
from torch_cudal1.judge.wire.tensor_bits import same_bits
from torch_cudal1.judge.worker.raw_copy import (
    RefusedOutput,
    copy_raw_tensors,
    refuse_lazy,
    save_raw_tensors,
)

CPU = torch.device("cpu")


def test_the_bytes_of_plain_tensors_arrive_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "outputs"
    tensors = [
        torch.randn(3, 4),
        None,
        torch.randn(4, 3).t(),
        torch.randn(5, 7)[1:, ::2],
        torch.randn(1).expand(4),
        torch.empty(0, 3),
        torch.tensor(True),
        torch.randn(3, dtype=torch.bfloat16),
    ]
    read_back = load_tensors(save_raw_tensors(tensors, path), path, CPU)
    for tensor, copy in zip(tensors, read_back, strict=True):
        assert (tensor is None) == (copy is None)
        assert (
            tensor is None
            or copy is None
            or (same_bits(tensor, copy) and tensor.stride() == copy.stride())
        )
    conjugated = torch.randn(3, dtype=torch.complex64).conj()
    (read_conjugated,) = load_tensors(save_raw_tensors([conjugated], path), path, CPU)
    assert read_conjugated is not None
    assert torch.equal(read_conjugated, conjugated)
    layout = save_tensors([tensors[0]], path)
    assert layout == save_raw_tensors([tensors[0]], path)


def test_a_copy_has_the_bytes_of_its_moment() -> None:
    tensors = [
        torch.randn(3, 4),
        None,
        torch.randn(5, 7)[1:, ::2],
        torch.randn(1).expand(4),
        torch.empty(0, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
    ]
    before = [None if tensor is None else tensor.clone() for tensor in tensors]
    copies = copy_raw_tensors(tensors)
    for tensor in (tensors[0], tensors[2]):
        assert tensor is not None
        tensor.zero_()
    for copy, old, tensor in zip(copies, before, tensors, strict=True):
        assert (copy is None) == (old is None)
        if copy is not None and old is not None and tensor is not None:
            assert torch.equal(copy, old)
            assert copy.stride() == tensor.stride()


def test_an_output_that_computes_late_is_refused_before_it_is_touched() -> None:
    class Late(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            raise AssertionError("touched")

    late = torch.ones(3).as_subclass(Late)
    with pytest.raises(RefusedOutput, match=r"Late, expected exactly torch\.Tensor"):
        refuse_lazy([None, late])
    refuse_lazy([None, torch.ones(3), torch.nn.Parameter(torch.ones(2))])


def test_an_output_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    short = torch.ones(16)
    short.untyped_storage().resize_(8)
    with pytest.raises(RefusedOutput, match="its storage has 8"):
        save_raw_tensors([short], tmp_path / "outputs")
