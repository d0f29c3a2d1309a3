"""What the text of a tile says: addresses by the number of a row, channels that are one number,
means that are summed once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.kernels import Proposal, propose
from torch_cudal1.kernels.lowering import lower

GROUPED = torch.randn(2, 8, 16, 16)
VECTOR = torch.randn(8)


def group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 2, weight, bias)


def write_looped_text(
    function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], columns: int
) -> str:
    program = trace_program(function, inputs)
    (family,) = {proposal.family for proposal in propose(program, 90)}
    config = {"rows": 1, "columns": columns, "warps": 4, "loop": True, "split": 1}
    return lower(program, Proposal(family, config)).kernels[-1].text


def test_what_lies_in_order_is_addressed_by_the_number_of_its_row_whatever_else_is_read() -> None:
    program = trace_program(
        lambda x, bias: x + bias, (torch.randn(4, 6, 5, 7), torch.randn(6, 1, 1))
    )
    text = lower(program, propose(program, 90)[0]).kernels[-1].text
    assert (
        "tl.load(p0 + row, " in text
    )  # contiguous, as a compiler can tell: 35 is no multiple of a vector
    assert "tl.load(p1 + row1, " in text


def test_what_has_gaps_is_not() -> None:
    x, bias = torch.randn(4, 6, 5, 14)[..., ::2], torch.randn(6, 1, 1)
    program = trace_program(lambda x, bias: x + bias, (x, bias))
    text = lower(program, propose(program, 90)[0]).kernels[-1].text
    assert "p0 + row," not in text


@pytest.mark.parametrize(("columns", "steady"), [(64, True), (256, True), (512, False)], ids=str)
def test_a_channel_is_one_number_where_a_tile_lies_within_it(columns: int, steady: bool) -> None:
    text = write_looped_text(group_norm, (GROUPED, VECTOR, VECTOR), columns)
    vectors = re.findall(r"tl\.load\(p[12] \+ [^)]*\)", text)
    assert vectors
    assert all(("at_column0" in load) is steady for load in vectors)
    assert text.count("tl.broadcast_to(tl.load(") == len(vectors) * steady


def test_offsets_beyond_31_bits_are_computed_in_64() -> None:
    wide, vector = (
        torch.empty(2, 65536, 64, 1024, device="meta"),
        torch.empty(65536, device="meta"),
    )  # 2^32 elements a row
    text = write_looped_text(lambda x, weight: F.group_norm(x, 1, weight), (wide, vector), 4096)
    assert "at_column0 = (start + tl.full([], 0, tl.int64)) // 65536" in text


def test_channels_of_a_size_that_no_tile_divides_are_read_for_each_element() -> None:
    text = write_looped_text(group_norm, (torch.randn(2, 8, 15, 15), VECTOR, VECTOR), 64)
    assert "at_column" not in text


def test_a_mean_beside_its_squared_deviations_is_summed_once() -> None:
    text = write_looped_text(lambda x: F.layer_norm(x, (1000,)), (torch.randn(3, 1000),), 256)
    assert len(re.findall(r"mean_t\d+ = tl\.zeros", text)) == 1
