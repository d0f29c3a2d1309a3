"""The other sizes and layouts that a source is called with; what they find is in test_detectors_state."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.judge.checks.layouts import (
    _channels_last_strides,
    _expand_strides,
    _list_sizes,
    _step_two_strides,
    _transpose_strides,
)


def test_sizes_go_around_a_tile_and_none_is_the_examples_own() -> None:
    assert _list_sizes(64, huge=False) == [65, 1, 61, 32, 63, 0, 128]
    assert _list_sizes(65_537, huge=True).count(65_537) == 0
    assert _list_sizes(8, huge=True)[-1] == 65_537


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (2, 3, 4, 5)])
def test_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    dense = torch.empty(shape).stride()
    assert _transpose_strides(shape, dense) == torch.empty(shape).mT.contiguous().mT.stride()
    assert _step_two_strides(shape, dense) == tuple(2 * step for step in dense)
    assert _expand_strides(shape, dense) == torch.empty(shape[1:]).expand(shape).stride()
    if len(shape) == 4:
        expected = torch.empty(shape).to(memory_format=torch.channels_last).stride()
        assert _channels_last_strides(shape, dense) == expected


def test_one_dimension_has_no_other_order() -> None:
    assert _transpose_strides((7,), (1,)) == (1,)
    assert _channels_last_strides((7,), (1,)) == (1,)
