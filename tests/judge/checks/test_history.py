"""Input sets that differ from another in one element or one factor, and in nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_cudal1.judge.checks.history import _change_one, _make_scaler, _map_inputs


def changed(inputs: list[torch.Tensor], *, last: bool, part: float) -> list[torch.Tensor]:
    def derive(
        base: Any,
        kind: str,
        make: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
    ) -> list[torch.Tensor]:
        return [old if new is None else new for old, new in zip(inputs, make(inputs), strict=True)]

    roles = ("input",) * (len(inputs) - 1) + ("parameter",)
    trial: Any = SimpleNamespace(reference=SimpleNamespace(roles=roles), derive=derive)
    made: Any = _change_one(trial, SimpleNamespace(inputs=inputs), "", last=last, part=part)  # type: ignore[arg-type]
    return made


def test_the_last_element_moves_by_a_share_of_the_rms() -> None:
    x, weight = torch.ones(4, 5).t(), torch.ones(3)
    moved, same = changed([x, weight], last=True, part=0.1)
    assert same is weight
    assert moved.stride() == x.stride()
    difference = moved - x
    assert int((difference != 0).sum()) == 1
    assert float(difference[-1, -1]) == pytest.approx(0.1)


def test_without_a_share_one_bit_flips() -> None:
    x = torch.full((8,), 1.0)
    moved, _ = changed([x, torch.ones(1)], last=False, part=0.0)
    (value,) = moved[moved != 1.0]
    assert float(value) == 1.0 + 2.0**-23


def test_factors_reach_plain_inputs_only() -> None:
    trial: Any = SimpleNamespace(reference=SimpleNamespace(roles=("input", "parameter")))
    scaled, same = _map_inputs(trial, _make_scaler(-2.0))([torch.ones(2, 3).t(), torch.ones(3)])
    assert same is None
    assert scaled is not None
    assert torch.equal(scaled, torch.full((3, 2), -2.0))
