"""Convolutions as classes of taps."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.kernels.ops.convolutions import find_convolution
from torch_cudal1.kernels.registry import trace


def convolution_of(function, *inputs: torch.Tensor):
    return find_convolution(tuple(o.node for o in trace(trace_program(function, inputs)).outputs))[
        1
    ]


def test_a_plain_convolution_has_one_class_of_taps() -> None:
    conv = convolution_of(
        lambda x, w: F.conv2d(x, w, padding=1), torch.empty(2, 4, 16, 16), torch.empty(8, 4, 3, 3)
    )
    assert (conv.images, conv.channels, conv.outputs) == (2, 4, 8)
    assert [len(axis.classes) for axis in conv.axes] == [1, 1, 1]
    assert [axis.taps for axis in conv.axes] == [1, 3, 3]
    assert conv.axes[2].low == -1


def test_a_transposed_one_has_a_class_for_each_place_of_its_stride() -> None:
    conv = convolution_of(
        lambda x, w: F.conv_transpose1d(x, w, stride=2), torch.empty(2, 4, 16), torch.empty(4, 8, 4)
    )
    assert [axis.taps for axis in conv.axes[2].classes and conv.axes] == [1, 1, 2]
    assert len(conv.axes[2].classes) == 2


def test_one_of_single_elements_has_one_long_axis() -> None:
    conv = convolution_of(F.conv2d, torch.empty(2, 4, 16, 16), torch.empty(8, 4, 1, 1))
    assert [axis.size for axis in conv.axes] == [1, 1, 256]
