"""Where tensors lie in memory: whether they lie where they lay, and which of them overlap."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["find_address_span", "find_overlaps", "lie_at"]

# One call in place of one a tensor. PyTorch's CUDA graphs use it, so only builds for CUDA have it.
_have_equal_addresses = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def lie_at(tensors: Sequence[torch.Tensor], addresses: list[int], positions: list[int]) -> bool:
    """Whether the tensors at `positions` begin at the addresses at the same positions."""
    # Lists: PyTorch's function takes nothing else.
    if _have_equal_addresses is not None:
        return bool(_have_equal_addresses(list(tensors), addresses, positions))
    return all(tensors[position].data_ptr() == addresses[position] for position in positions)


def find_address_span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last address of a dense tensor's elements, in bytes."""
    begin = tensor.data_ptr()
    # The span of strides, not `numel`: a view may skip elements.
    reach = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        + 1
        if tensor.numel()
        else 0
    )
    return begin, begin + reach * tensor.element_size()


def find_overlaps(
    addresses: Sequence[int], sizes: Sequence[int], written: frozenset[int]
) -> frozenset[tuple[int, int]]:
    """Pairs of tensors, by position, whose memory overlaps, one of them written; `sizes` in bytes. One
    sweep over the addresses: few overlap at all.
    """
    spans = sorted(
        (begin, begin + size, number)
        for number, (begin, size) in enumerate(zip(addresses, sizes, strict=True))
    )
    open_spans: list[tuple[int, int, int]] = []
    positions = set()
    for begin, end, number in spans:
        # Sorted by start, so spans that ended before this one overlap none of the following either.
        open_spans = [span for span in open_spans if span[1] > begin]
        # An empty tensor overlaps nothing.
        if end > begin:
            positions |= {
                (min(number, other), max(number, other))
                for _, _, other in open_spans
                if {number, other} & written
            }
            open_spans.append((begin, end, number))
    return frozenset(positions)
