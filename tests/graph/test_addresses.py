"""Where tensors lie: the same place as before, and whether they overlap."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.graph.addresses import find_address_span, find_overlaps, lie_at

BUFFER = torch.arange(32.0)


def test_a_tensor_that_moved_is_noticed_only_at_a_position_that_counts() -> None:
    first, second = torch.ones(3), torch.ones(3)
    addresses = [first.data_ptr(), second.data_ptr()]
    assert lie_at([first, second], addresses, [0, 1])
    assert not lie_at([first, second.clone()], addresses, [0, 1])
    assert lie_at([first, second.clone()], addresses, [0])
    assert lie_at([second, first], addresses, [])


@pytest.mark.parametrize(
    ("tensor", "elements"),
    [
        (BUFFER[4:8], 4),
        (BUFFER[:8].view(2, 4).t(), 8),
        (BUFFER[::4], 29),
        (BUFFER[:1].expand(9), 1),
        (BUFFER[:0], 0),
    ],
)
def test_a_span_reaches_over_what_a_view_skips(tensor: torch.Tensor, elements: int) -> None:
    begin, end = find_address_span(tensor)
    assert begin == tensor.data_ptr()
    assert end - begin == 4 * elements


def test_two_reads_of_one_memory_are_no_overlap_and_a_write_is() -> None:
    tensors = [BUFFER[:8], BUFFER[4:12], BUFFER[12:], BUFFER[:0]]
    spans = [find_address_span(tensor) for tensor in tensors]
    addresses, sizes = [begin for begin, _ in spans], [end - begin for begin, end in spans]
    assert find_overlaps(addresses, sizes, frozenset()) == frozenset()
    assert find_overlaps(addresses, sizes, frozenset({2, 3})) == frozenset()
    assert find_overlaps(addresses, sizes, frozenset({0})) == frozenset({(0, 1)})
    assert find_overlaps(addresses, sizes, frozenset({1})) == frozenset({(0, 1)})
