"""NaN and infinities that rounding decides about: excused where eager's own change with it, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks.rounding import is_decided_by_rounding
from torch_cudal1.judge.reference.compare import mask_mismatches
from torch_cudal1.judge.reference.region_reference import ReferenceFailure

INF = float("inf")
ROWS, TERMS = 200_000, 8


def sum_and_rectify(x: torch.Tensor, w: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A sum in some order, a ReLU, an infinite weight: NaN of a zero, infinity of what is just
    above it.
    """
    total = torch.zeros(len(x))
    for term in order:
        total = total + x[:, term] * w[term]
    return total.relu() * INF


def draw_inputs(cancelling: int) -> list[torch.Tensor]:
    """Sums that cancel exactly but for rounding in the first rows."""
    x = torch.randn(ROWS, TERMS, generator=torch.Generator().manual_seed(5))
    x[:cancelling, 4:] = -x[:cancelling, :4]
    return [x, torch.full((TERMS,), 0.3)]


def is_excused(
    eager: Callable[..., torch.Tensor], inputs: list[torch.Tensor], result: torch.Tensor
) -> bool:
    def run(moved_inputs: Sequence[torch.Tensor]) -> Any:
        return SimpleNamespace(outputs=[eager(*moved_inputs)])

    sample = SimpleNamespace(inputs=inputs, expected=run(inputs), eager=run)
    trial = SimpleNamespace(device=torch.device("cpu"), contract=Contract())
    wrong = mask_mismatches(result, [sample.expected.outputs[0]])
    assert bool(wrong.any())
    return is_decided_by_rounding(trial, sample, 0, wrong)  # type: ignore[arg-type]


def eager(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return sum_and_rectify(x, w, range(TERMS))


def test_another_order_of_a_sum_is_excused() -> None:
    inputs = draw_inputs(cancelling=15)
    assert is_excused(eager, inputs, sum_and_rectify(*inputs, [0, 4, 1, 5, 2, 6, 3, 7]))


def test_more_places_than_a_few_are_not() -> None:
    inputs = draw_inputs(cancelling=2_000)
    assert not is_excused(eager, inputs, sum_and_rectify(*inputs, [0, 4, 1, 5, 2, 6, 3, 7]))


@pytest.mark.parametrize("value", [0.0, INF, -INF, float("nan")])
def test_a_place_that_rounding_does_not_touch_is_not(value: float) -> None:
    inputs = draw_inputs(cancelling=15)
    result = eager(*inputs)
    settled = int((inputs[0] @ inputs[1]).abs().argmax())
    if result[settled].isnan() == torch.tensor(value).isnan() or result[settled] == value:
        settled = int(
            (inputs[0] @ inputs[1]).argmax() if value != INF else (inputs[0] @ inputs[1]).argmin()
        )
    result[settled] = value
    assert not is_excused(eager, inputs, result)


def test_a_nan_that_is_swallowed_is_not() -> None:
    inputs = draw_inputs(cancelling=0)
    inputs[0][7, 3] = float("nan")
    result = torch.nan_to_num(eager(*inputs), nan=0.0, posinf=INF)
    result[torch.arange(ROWS) != 7] = eager(*inputs)[torch.arange(ROWS) != 7]
    assert not is_excused(eager, inputs, result)


def test_a_reference_that_changes_everywhere_excuses_nothing() -> None:
    def strict(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.where(x[:, 0] * w[0] == x[:, 0] * 0.3, eager(x, w), 1.0)

    inputs = draw_inputs(cancelling=15)
    result = strict(*inputs)
    result[100] = 1.0 if not result[100].isfinite() else INF
    assert not is_excused(strict, inputs, result)


def test_a_reference_that_refuses_moved_inputs_excuses_nothing() -> None:
    inputs, calls = draw_inputs(cancelling=15), []

    def once(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ReferenceFailure("running eager", "not these")
        return eager(x, w)

    assert not is_excused(once, inputs, sum_and_rectify(*inputs, [0, 4, 1, 5, 2, 6, 3, 7]))
