"""A kernel is dead where leaving it out changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.judge.programs import candidate, linear_relu
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks.memory import dead_launches
from torch_cudal1.judge.checks.memory.dead_launches import GHOST


@pytest.mark.parametrize(
    ("idle", "infinities", "finite", "passes"),
    [
        (False, 0, False, True),
        (True, 0, False, False),
        (True, 2, False, True),
        (True, 2, True, False),
    ],
)
def test_a_kernel_is_dead_only_where_no_byte_in_its_place_and_no_infinity_changes_the_result(
    monkeypatch: pytest.MonkeyPatch, idle: bool, infinities: int, finite: bool, passes: bool
) -> None:
    """`infinities`: with which of the two inputs that have one it is of use, counted from 1."""
    fills: list[int] = []

    def run_without(trial: object, sample: object, byte: int, *, skip: int) -> list[torch.Tensor]:
        if skip == 1 and sample is first_set:
            fills.append(byte)
        changed = skip == 0 or (
            skip == 1 and not idle and len(set(fills)) > 1
        )  # the first byte means what was to be written
        return [torch.tensor(float(changed or (skip == 1 and sample == infinities)))]

    def list_variants(trial: object, sample: object) -> Iterator[int]:
        yield from (1, 2)

    monkeypatch.setattr(dead_launches, "_run_without", run_without)
    monkeypatch.setattr(dead_launches, "iter_infinite_variants", list_variants)
    monkeypatch.setattr(dead_launches, "count_launches", lambda program: 2)
    first_set = SimpleNamespace(expected=SimpleNamespace(outputs=[torch.tensor([1.0, 2.0])]))
    trial: Any = SimpleNamespace(
        candidate=candidate(linear_relu()),
        contract=Contract(assume_finite=finite),
        first_two=(first_set, None),
    )
    (check,) = GHOST.run(trial)
    assert check.passed is passes, check
    assert len(set(fills)) == len(fills) > 1
    first_set.expected.outputs = [torch.zeros(3), None]
    (check,) = GHOST.run(trial)
    assert check.passed
    assert "one number" in check.detail
