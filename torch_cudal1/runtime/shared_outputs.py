"""Outputs of a function that share memory, taken apart into memory that is copied once and views of
the copies.

In eager a write to one of two outputs that share memory shows in the other. A CUDA graph's outputs
are copied before they are handed out; copied one by one they would share nothing. The first hidden
state that a vision transformer returns beside all of them is the common case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from torch_cudal1.core.errors import NotLowerableError

__all__ = ["Assembly", "OutputView", "assemble", "split_shared"]


@dataclass(frozen=True)
class OutputView:
    """An output as a view of the copy at `position`; `offset`, in elements, is from its begin."""

    position: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


# For each output: a view, or the position of the copy that is the output itself.
Assembly: TypeAlias = "tuple[OutputView | int, ...]"


def split_shared(
    outputs: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor | None], Assembly | None]:
    """What is to be copied, and how the outputs are made of the copies; (`outputs`, None) where no two
    share memory.

    Raises NotLowerableError for outputs of different dtypes in one memory.
    """
    sharing: defaultdict[int, list[int]] = defaultdict(list)
    for position, output in enumerate(outputs):
        if output is not None and output.numel():
            sharing[output.untyped_storage().data_ptr()].append(position)
    groups = [positions for positions in sharing.values() if len(positions) > 1]
    if not groups:
        return list(outputs), None
    grouped = {position: group for group in groups for position in group}
    copied: list[torch.Tensor | None] = []
    assembly: list[OutputView | int] = []
    spans: dict[int, tuple[int, int]] = {}
    for position, output in enumerate(outputs):
        if position not in grouped:
            assembly.append(len(copied))
            copied.append(output)
            continue
        group = grouped[position]
        if group[0] not in spans:
            span, begin = _make_span([outputs[member] for member in group])
            spans[group[0]] = len(copied), begin
            copied.append(span)
        assert output is not None
        copy_position, begin = spans[group[0]]
        offset = int(output.storage_offset()) - begin
        assembly.append(OutputView(copy_position, tuple(output.shape), output.stride(), offset))
    return copied, tuple(assembly)


def assemble(
    assembly: Assembly, copies: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The outputs, as copies and views of copies."""
    outputs: list[torch.Tensor | None] = []
    for item in assembly:
        if isinstance(item, int):
            outputs.append(copies[item])
            continue
        base = copies[item.position]
        assert base is not None
        outputs.append(torch.as_strided(base, item.shape, item.strides, item.offset))
    return outputs


def _make_span(outputs: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, int]:
    """All memory from the first to the last element of tensors that share a storage, as one row of
    elements, and the offset of its begin in the storage.
    """
    tensors = [output for output in outputs if output is not None]
    first = tensors[0]
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise NotLowerableError(
            "two outputs of different dtypes share memory, which a CUDA graph does not hand out"
        )
    begin = min(int(tensor.storage_offset()) for tensor in tensors)
    end = max(
        tensor.storage_offset()
        + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        for tensor in tensors
    )
    span = torch.empty(0, dtype=first.dtype, device=first.device)
    return span.set_(first.untyped_storage(), begin, (end - begin + 1,), (1,)), begin
