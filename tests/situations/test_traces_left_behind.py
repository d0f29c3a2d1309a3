"""A forward keeps something for later: what it keeps is real, and no other code finds a
tracer's tensor in it.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_cudal1
from tests.situations.kit import DOORS, Door, Scene, SceneLayer, X, check, scenes_of

TABLES: dict[int, torch.Tensor] = {}
SEEN: list[torch.Tensor] = []


def around(forward: Any, **attributes: Any) -> nn.Module:
    return type("Keeps", (SceneLayer,), {"forward": forward, **attributes})()


def positions(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[-1], dtype=x.dtype) / x.shape[-1]


def call_and_restore(door: Door, module: nn.Module, *other_modules: nn.Module) -> list[Any]:
    """Answers through the door, of the module itself after it, and of other modules that share what
    it kept.
    """
    call = door(module, X)
    answers = [call(X).clone() for _ in range(3)]
    answers += [torch_cudal1.restore(module)(X).clone() for _ in range(2)]
    return [*answers, *(other_module(X).clone() for other_module in other_modules)]


def on_self(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = positions(x)
        return self.h(x) + self.table

    return call_and_restore(door, around(forward, table=None))


def on_the_class(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if type(self).table is None:
            type(self).table = positions(x)
        return self.h(x) + type(self).table

    module = around(forward, table=None)
    return call_and_restore(door, module, type(module)())


def in_a_global_table(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] not in TABLES:
            TABLES[x.shape[-1]] = positions(x)
        return self.h(x) + TABLES[x.shape[-1]]

    TABLES.clear()
    module = around(forward)
    return [
        *call_and_restore(door, module, type(module)()),
        [type(table) for table in TABLES.values()] == [torch.Tensor],
    ]


def in_a_closure(door: Door) -> Any:
    cache: list[torch.Tensor] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not cache:
            cache.append(positions(x))
        return self.h(x) + cache[0]

    module = around(forward)
    return [*call_and_restore(door, module, type(module)()), type(cache[0]) is torch.Tensor]


def under_an_lru_cache(door: Door) -> Any:
    @functools.lru_cache(maxsize=4)
    def table(size: int) -> torch.Tensor:
        return torch.arange(size) / size

    module = around(lambda self, x: self.h(x) + table(x.shape[-1]))
    answers = call_and_restore(door, module, type(module)())
    return [*answers, type(table(8)) is torch.Tensor]


def in_a_buffer(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.last = self.h(x).detach()
        return self.last + 1

    module = around(forward)
    module.register_buffer("last", torch.zeros(4, 8))
    answers = call_and_restore(door, module)
    return [*answers, module.last.clone(), type(module.last) is torch.Tensor]


def in_a_list_of_the_module(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(self.h(x))
        return SEEN[-1] + len(SEEN)

    SEEN.clear()
    answers = call_and_restore(door, around(forward))
    return [*answers, len(SEEN), all(type(tensor) is torch.Tensor for tensor in SEEN)]


def rotary_tables_of_two_lengths(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.longest:
            self.longest = x.shape[0]
            self.angles = torch.outer(torch.arange(self.longest).float(), torch.ones(8))
        return self.h(x) * self.angles[: x.shape[0]].cos()

    module = around(forward, longest=0, angles=None)
    call = door(module, X)
    return [call(x).clone() for x in (X, X, X[:2], torch.cat([X, X]), X, X[:2], torch.cat([X, X]))]


def a_weight_that_is_normalised(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return self.h(x)

    module = around(forward)
    answers = call_and_restore(door, module)
    return [*answers, module.weight.detach().clone()]


SCENES: tuple[Scene, ...] = scenes_of(globals())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_what_is_kept_is_real(scene: Scene, door: str, tmp_path: Path) -> None:
    check(scene, door, tmp_path)


def test_there_are_enough_scenes() -> None:
    assert len(SCENES) >= 9


@torch.no_grad()
def test_a_search_leaves_the_random_generators_as_they_were(tmp_path: Path) -> None:
    """Everything in it that is drawn, inputs and orders of measurement, is drawn from generators of
    its own.
    """
    module = nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64), nn.Softmax(-1)
    ).eval()
    before = torch.get_rng_state(), random.getstate()
    torch_cudal1.accelerate(
        module, torch.ones(32, 64), on_miss="tune", cache_dir=tmp_path, budget_s=5.0
    )
    assert torch_cudal1.explain(module).regions
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
