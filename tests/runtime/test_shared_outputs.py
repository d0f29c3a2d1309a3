"""Outputs that share memory are copied once and handed out as views of the copy."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.runtime.shared_outputs import assemble, split_shared


def hand_out(outputs: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """What a caller gets of `outputs` that are copied before they are handed out."""
    copied, assembly = split_shared(outputs)
    copies = [None if tensor is None else tensor.clone() for tensor in copied]
    return copies if assembly is None else assemble(assembly, copies)


def test_outputs_in_memory_of_their_own_are_copied_as_they_are() -> None:
    base = torch.zeros(4, 4)
    outputs = [base, None, base.clone(), torch.empty(0), torch.empty(0)]
    copied, assembly = split_shared(outputs)
    assert assembly is None
    assert [item is output for item, output in zip(copied, outputs, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    "make",
    [
        lambda base: [base, base[:, 0]],
        lambda base: [base[:, 0], None, base],
        lambda base: [base[1], base.T, torch.ones(2)],
        lambda base: [base[2:, 1:3], base[3:, 2:]],
        lambda base: [base, base],
        lambda base: [base.view(2, 8), base[1:].expand(2, 3, 4)],
    ],
)
def test_a_write_to_one_of_them_shows_in_the_other_as_in_eager(make) -> None:
    eager = make(torch.arange(16.0).view(4, 4))
    handed_out = hand_out(make(torch.arange(16.0).view(4, 4)))
    for value, expected in zip(handed_out, eager, strict=True):
        assert (value is None) == (expected is None)
        if expected is not None:
            assert value.stride() == expected.stride()
            assert torch.equal(value, expected)
    for outputs in (eager, handed_out):
        outputs[0].select(0, 0).fill_(-1)
    assert all(
        torch.equal(value, expected)
        for value, expected in zip(handed_out, eager, strict=True)
        if expected is not None
    )


def test_what_is_handed_out_shares_nothing_with_the_function() -> None:
    base = torch.arange(16.0).view(4, 4)
    first, second = hand_out([base, base[0]])
    base.fill_(7)
    assert first is not None
    assert second is not None
    assert (float(first[0, 1]), float(second[1])) == (1.0, 1.0)


def test_outputs_of_two_dtypes_in_one_memory_are_refused() -> None:
    base = torch.zeros(4)
    with pytest.raises(NotLowerableError, match="different dtypes"):
        split_shared([base, base.view(torch.int32)])
