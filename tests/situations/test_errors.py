"""What eager raises is raised, in the same place; what it answers is answered; and a call that
raised leaves the next one right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.situations.kit import DOORS, Door, Scene, SceneLayer, X, check, outcome, scenes_of

GOOD, BAD = torch.tensor([0, 3, 1, 2]), torch.tensor([0, 3, 9, 2])


def around(forward: Any, **attributes: Any) -> nn.Module:
    return type("Raises", (SceneLayer,), {"forward": forward, **attributes})()


def good_bad_good(door: Door, module: nn.Module, good: Any, *bad: Any) -> list[Any]:
    """Outcomes of a good call, bad ones, and a good one again."""
    call = door(module, X, good)
    return [outcome(call, X, argument) for argument in (good, good, *bad, good)]


def an_index_out_of_a_table(door: Door) -> Any:
    module = around(lambda self, x, index: self.h(x) + self.table(index))
    module.table = nn.Embedding(8, 8, _weight=torch.ones(8, 8))
    return good_bad_good(door, module, GOOD, BAD, -BAD)


def an_index_out_of_a_tensor(door: Door) -> Any:
    return good_bad_good(
        door, around(lambda self, x, index: self.h(x)[index]), GOOD, BAD, -GOOD, -BAD
    )


def a_gathered_index(door: Door) -> Any:
    module = around(lambda self, x, index: torch.gather(self.h(x), 1, index[:, None]))
    return good_bad_good(door, module, GOOD, BAD, -BAD)


def a_computed_index(door: Door) -> Any:
    return good_bad_good(
        door, around(lambda self, x, index: self.h(x).index_select(0, index * 2 - index)), GOOD, BAD
    )


def a_target_out_of_the_classes(door: Door) -> Any:
    return good_bad_good(
        door, around(lambda self, x, target: F.cross_entropy(self.h(x), target)), GOOD, BAD
    )


def a_class_value_out_of_range(door: Door) -> Any:
    return good_bad_good(
        door, around(lambda self, x, target: self.h(x) + F.one_hot(target, 8)), GOOD, BAD, -GOOD
    )


def an_asserted_condition(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        torch._assert_async((limit > 0).all(), "limit must be positive")
        return self.h(x)

    return good_bad_good(door, around(forward), torch.ones(3), torch.zeros(3))


def an_assert_statement_on_a_value(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        assert limit.sum() > 0, "limit must be positive"
        return self.h(x)

    return good_bad_good(door, around(forward), torch.ones(3), torch.zeros(3))


def a_check_of_a_shape(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mask.shape[0] != x.shape[0]:
            raise ValueError("mask and input differ")
        return self.h(x) * mask[:, None]

    return good_bad_good(door, around(forward), torch.ones(4), torch.ones(5))


def a_shape_that_does_not_fit(door: Door) -> Any:
    return good_bad_good(
        door, around(lambda self, x, y: self.h(x) + y), torch.ones(8), torch.ones(5)
    )


def a_dtype_that_does_not_fit(door: Door) -> Any:
    return good_bad_good(
        door,
        around(lambda self, x, y: self.h(x) @ y),
        torch.ones(8, 2),
        torch.ones(8, 2, dtype=torch.float64),
    )


def an_exception_that_is_caught_inside(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, options: dict[str, float]) -> torch.Tensor:
        try:
            gain = options["gain"]
        except KeyError:
            gain = 5.0
        return self.h(x) * gain

    return good_bad_good(door, around(forward), {"gain": 2.0}, {}, {"gain": 3.0})


def a_missing_argument(door: Door) -> Any:
    call = door(around(lambda self, x, y: self.h(x) + y), X, torch.ones(8))
    return [
        outcome(call, X, torch.ones(8)),
        outcome(call, X),
        outcome(call, X, torch.ones(8), 3),
        outcome(call, X, torch.ones(8)),
    ]


def a_generator_that_is_returned(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, pieces: int) -> Any:
        for piece in range(pieces):
            yield self.h(x) + piece

    call = door(around(forward), X, 3)
    return [[tensor.clone() for tensor in call(X, 3)] for _ in range(2)]


def a_set_that_is_returned(door: Door) -> Any:
    call = door(around(lambda self, x, y: {self.h(x).shape[0], 3}), X, 1)
    return [sorted(call(X, 1)) for _ in range(2)]


SCENES: tuple[Scene, ...] = scenes_of(globals())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_outcomes_are_eager_s(scene: Scene, door: str, tmp_path: Path) -> None:
    check(scene, door, tmp_path)


def test_there_are_enough_scenes() -> None:
    assert len(SCENES) >= 15
