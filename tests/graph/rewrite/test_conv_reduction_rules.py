"""Sums and means of convolutions: the rewritten graph stays near float64 for every stride, padding
and dilation it accepts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.graph.rewrite.helpers import capture, close_to_float64, ops
from tests.graph.rewrite.test_reduction_rules import draw, same_specials
from torch_cudal1.graph.rewrite import RewriteResult, rewrite
from torch_cudal1.graph.rewrite.conv_reduction_rules import CONV_REDUCTION_RULES

Fn = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]

PLAIN = ((1, 8, 21, 20), (64, 8, 3, 3), (64,))
WIDE = ((1, 8, 21, 20), (256, 8, 3, 4), (256,))
TRANSPOSED = ((1, 8, 11, 12), (8, 96, 3, 4), (96,))
POSITIONS: list[tuple[str, Fn, Shapes]] = [
    ("mean", lambda x, w, b: F.conv2d(x, w, b).mean((2, 3)), PLAIN),
    ("sum, padded", lambda x, w, b: F.conv2d(x, w, b, padding=1).sum((2, 3), keepdim=True), PLAIN),
    ("adaptive pool", lambda x, w, b: F.adaptive_avg_pool2d(F.conv2d(x, w, b), 1), PLAIN),
    (
        "adaptive pool of lines",
        lambda x, w, b: F.adaptive_avg_pool1d(F.conv1d(x, w, b), 1),
        ((2, 8, 90), (256, 8, 5), (256,)),
    ),
    (
        "kernel 1, no bias",
        lambda x, w: F.conv2d(x, w).mean((2, 3)),
        ((2, 8, 21, 20), (96, 8, 1, 1)),
    ),
    (
        "stride with a rest",
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=(1, 2)).mean((2, 3)),
        WIDE,
    ),
    ("dilation", lambda x, w, b: F.conv2d(x, w, b, dilation=(2, 3), padding=2).sum((2, 3)), WIDE),
    (
        "one dim of three",
        lambda x, w, b: F.conv3d(x, w, b, stride=(1, 2, 1)).mean(2),
        ((2, 4, 9, 10, 11), (64, 4, 3, 3, 3), (64,)),
    ),
    ("the last of two", lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=1).sum(3), WIDE),
    ("everything", lambda x, w, b: F.conv2d(x, w, b, padding=1).mean(), PLAIN),
    (
        "scaled and shifted",
        lambda x, w, b, v: (2 * F.conv2d(x, w, b) + v).mean((2, 3)),
        (*PLAIN, (64, 1, 1)),
    ),
    ("transposed", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2).mean((2, 3)), TRANSPOSED),
    (
        "transposed, cropped",
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1).sum((2, 3)),
        TRANSPOSED,
    ),
    (
        "grown",
        lambda x, w, b: F.conv_transpose2d(x, w, b, 3, 2, output_padding=1, dilation=2).mean(
            (2, 3)
        ),
        TRANSPOSED,
    ),
    (
        "transposed, one dim",
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1).mean(2),
        TRANSPOSED,
    ),
]
CHANNELS: list[tuple[str, Fn, Shapes]] = [
    ("mean", lambda x, w, b: F.conv2d(x, w, b, padding=1).mean(1, keepdim=True), PLAIN),
    (
        "with a bias after it",
        lambda x, w, v: (F.conv2d(x, w, stride=2) + v).sum(1),
        ((2, 8, 21, 20), (64, 8, 3, 3), (64, 1, 1)),
    ),
    (
        "transposed",
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1).mean(1, keepdim=True),
        TRANSPOSED,
    ),
    (
        "three dims",
        lambda x, w, b: F.conv3d(x, w, b, dilation=2).sum(1),
        ((2, 4, 9, 10, 11), (64, 4, 3, 3, 3), (64,)),
    ),
]


CASES = [(*case, "reduce_before_convolution") for case in POSITIONS] + [
    (*case, "sum_channels_of_weight") for case in CHANNELS
]
each_case = pytest.mark.parametrize(
    "place", range(len(CASES)), ids=[f"{case[3]}: {case[0]}" for case in CASES]
)


@functools.cache
def rewrite_case(place: int) -> tuple[RewriteResult, bool]:
    """The rewritten case, and whether its convolution pads."""
    gm = capture(CASES[place][1], *draw(*CASES[place][2]))
    convolution = next(
        node for node in gm.graph.nodes if node.target is torch.ops.aten.convolution.default
    )
    return rewrite(gm, CONV_REDUCTION_RULES, assume_finite=False), any(convolution.args[4])


@each_case
def test_the_reduction_goes_before_the_convolution_and_stays_near_float64(place: int) -> None:
    _, fn, shapes, name = CASES[place]
    rewritten, _ = rewrite_case(place)
    assert rewritten.sites == {name: 1}
    inputs = draw(*shapes, seed=1)
    close_to_float64(rewritten.gm, fn, inputs[0] + 3, *inputs[1:])


@each_case
def test_nan_and_infinity_come_out_where_eager_has_them(place: int) -> None:
    _, fn, shapes, _ = CASES[place]
    rewritten, pads = rewrite_case(place)
    for which in range(len(shapes)):
        for value, positive in (
            (math.nan, False),
            (math.inf, False),
            (math.inf, True),
            (-math.inf, False),
        ):
            if which == 1 and pads:
                # whether the zeros of the padding meet the weight differs between eager's own
                # algorithms
                continue
            inputs = draw(*shapes, seed=2)
            inputs = [x.abs() + 0.1 for x in inputs] if positive else inputs
            inputs[which].view(-1)[
                inputs[which].numel() // 2 + 3 * (inputs[which].numel() > 999)
            ] = value
            same_specials(rewritten.gm, fn, *inputs)


@settings(max_examples=10, deadline=None)
@given(
    size=st.integers(9, 24),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_geometry_stays_near_float64(
    size: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool, seed: int
) -> None:
    convolve = F.conv_transpose1d if transposed else F.conv1d
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    fn: Fn = lambda x, w, b: convolve(x, w, b, **options).mean(2)
    assume(
        dilation * (kernel - 1) < size and (not transposed or padding <= dilation * (kernel - 1))
    )
    x, w, b = draw(
        (2, 3, size), (3, 500, kernel) if transposed else (500, 3, kernel), (500,), seed=seed
    )
    rewritten = rewrite(capture(fn, x, w, b), CONV_REDUCTION_RULES, assume_finite=False)
    close_to_float64(rewritten.gm, fn, x + 1, w, b)


LEFT_ALONE: list[tuple[str, Fn, Shapes]] = [
    ("groups", lambda x, w: F.conv2d(x, w, groups=2).mean((2, 3)), ((2, 8, 21, 20), (64, 4, 3, 3))),
    (
        "channels of groups",
        lambda x, w: F.conv2d(x, w, groups=2).mean(1),
        ((2, 8, 21, 20), (64, 4, 3, 3)),
    ),
    ("another user", lambda x, w: (y := F.conv2d(x, w)).mean((2, 3)) + y[:, :, 0, 0], PLAIN[:2]),
    ("an output", lambda x, w: ((y := F.conv2d(x, w)), y.mean(1)), PLAIN[:2]),
    ("relu between", lambda x, w: F.conv2d(x, w).relu().mean((2, 3)), PLAIN[:2]),
    ("only the batch", lambda x, w: F.conv2d(x, w).mean(0), PLAIN[:2]),
    (
        "too few channels to pay",
        lambda x, w: F.conv2d(x, w).mean((2, 3)),
        ((2, 8, 21, 20), (2, 8, 3, 3)),
    ),
    (
        "taps that meet nothing",
        lambda x, w: F.conv_transpose1d(x, w, padding=2).mean(2),
        ((2, 3, 1), (3, 4000, 6)),
    ),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in LEFT_ALONE], ids=[case[0] for case in LEFT_ALONE]
)
def test_what_is_not_valid_or_not_cheaper_is_left_alone(fn: Fn, shapes: Shapes) -> None:
    gm = capture(fn, *draw(*shapes))
    rewritten = rewrite(gm, CONV_REDUCTION_RULES, assume_finite=False)
    assert rewritten.sites == {}
    assert ops(rewritten.gm) == ops(gm)


def test_float16_sums_are_left_alone_and_means_are_not() -> None:
    inputs = draw(*PLAIN[:2], dtype=torch.float16)
    summed = rewrite(
        capture(lambda x, w: F.conv2d(x, w).sum((2, 3)), *inputs),
        CONV_REDUCTION_RULES,
        assume_finite=False,
    )
    mean: Fn = lambda x, w: F.conv2d(x, w).mean((2, 3))
    averaged = rewrite(capture(mean, *inputs), CONV_REDUCTION_RULES, assume_finite=False)
    assert (summed.sites, averaged.sites) == ({}, {"reduce_before_convolution": 1})
    close_to_float64(averaged.gm, mean, *inputs)
