"""What a forward does beside its result happens as often as in eager, in the same order, with real
tensors.
"""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import random
import types
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.situations.kit import DOORS, Door, Scene, SceneLayer, X, check, scenes_of

COUNTS: collections.Counter[str] = collections.Counter()
CALLS = 0
LOG = logging.getLogger("situations")


class Metrics:
    calls = 0
    seen: ClassVar[list[float]] = []


def around(forward: Any, **attributes: Any) -> nn.Module:
    return type("Acts", (SceneLayer,), {"forward": forward, **attributes})()


def three(door: Door, module: nn.Module, read_effect: Any) -> Any:
    """Three calls, and what there is to see after each."""
    call = door(module, X)
    return [(call(X).clone(), read_effect()) for _ in range(3)]


def a_counter_on_self(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.h(x) * self.calls

    module = around(forward, calls=0)
    return three(door, module, lambda: module.calls)


def a_counter_behind_a_global_name(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        Metrics.calls += 1
        return self.h(x)

    Metrics.calls = 0
    return three(door, around(forward), lambda: Metrics.calls)


def a_global_number_that_is_assigned(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return self.h(x)

    globals().update(CALLS=0)
    return three(door, around(forward), lambda: CALLS)


def a_global_counter_of_collections(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        COUNTS["calls"] += 1
        return self.h(x)

    COUNTS.clear()
    return three(door, around(forward), lambda: COUNTS["calls"])


def a_list_that_grows(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.history.append(x.shape[0])
        return self.h(x)

    module = around(forward)
    module.history = []
    return three(door, module, lambda: list(module.history))


def the_caller_s_dict(door: Door) -> Any:
    def forward(self: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch["features"] = self.h(batch["x"])
        return batch

    call, answers = door(around(forward), {"x": X}), []
    for _ in range(3):
        batch = {"x": X}
        result = call(batch)
        answers.append((sorted(batch), result is batch, batch["features"].clone()))
    return answers


def the_caller_s_list(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, hidden: list[torch.Tensor]) -> torch.Tensor:
        hidden.append(self.h(x))
        return hidden[-1] + 1

    call, answers = door(around(forward), X, []), []
    for _ in range(3):
        hidden: list[torch.Tensor] = []
        answers.append((call(X, hidden).clone(), len(hidden), hidden[0].clone()))
    return answers


def an_attribute_of_the_caller_s_object(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor, box: Any) -> torch.Tensor:
        box.last = self.h(x)
        return box.last * 2

    call, answers = door(around(forward), X, types.SimpleNamespace()), []
    for _ in range(3):
        box = types.SimpleNamespace()
        answers.append((call(X, box).clone(), box.last.clone()))
    return answers


def prints(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        print("called")
        return self.h(x)

    call = door(around(forward), X)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        answers = [call(X).clone() for _ in range(3)]
    return [*answers, out.getvalue()]


def warns(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("look out", UserWarning, stacklevel=2)
        return self.h(x)

    call, counts = door(around(forward), X), []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(X)
        counts.append(sum("look out" in str(warning.message) for warning in caught))
    return counts


def logs(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        LOG.error("called")
        return self.h(x)

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    LOG.addHandler(handler)
    try:
        call = door(around(forward), X)
        records.clear()
        return [(call(X).clone(), len(records)) for _ in range(3)]
    finally:
        LOG.removeHandler(handler)


def a_hook_on_an_intermediate_tensor(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = self.h(x)
        hidden.register_hook(lambda grad: Metrics.seen.append(float(grad.sum())))
        return hidden * 2

    Metrics.seen = []
    with torch.enable_grad():
        call = door(around(forward), X)
        Metrics.seen.clear()
        for _ in range(3):
            call(X).sum().backward()
    return list(Metrics.seen)


def a_gradient_asked_of_the_input(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        return self.h(x)

    with torch.enable_grad():
        call, answers = door(around(forward), X.clone()), []
        for _ in range(3):
            x = X.clone()
            call(x).sum().backward()
            answers.append((x.requires_grad, x.grad.clone()))
    return answers


def a_grad_mode_that_is_left_behind(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = self.h(x)
        torch.set_grad_enabled(False)
        return hidden * 2

    answers = []
    with torch.enable_grad():
        call = door(around(forward), X)
    for _ in range(3):
        with torch.enable_grad():
            answers.append((call(X).clone(), torch.is_grad_enabled()))
    return answers


def a_buffer_that_is_counted_up(door: Door) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.scale += 1
        return self.h(x)

    module = around(forward)
    buffer, call = module.scale, door(module, X)
    return [(call(X).clone(), module.scale.clone(), module.scale is buffer) for _ in range(3)]


def random_numbers_of_python(door: Door) -> Any:
    call = door(around(lambda self, x: self.h(x) * random.random()), X)
    random.seed(3)
    return [*(call(X).clone() for _ in range(3)), random.random()]


def random_numbers_of_torch(door: Door) -> Any:
    call = door(around(lambda self, x: self.h(x) + torch.rand(8)), X)
    torch.manual_seed(3)
    return [*(call(X).clone() for _ in range(3)), torch.rand(2)]


def a_hook_of_the_module(door: Door) -> Any:
    module = around(lambda self, x: self.h(x))
    module.register_forward_hook(
        lambda _, __, output: Metrics.seen.append(output.shape[0]) or output * 2
    )
    Metrics.seen = []
    call = door(module, X)
    Metrics.seen.clear()
    return [(call(X).clone(), len(Metrics.seen)) for _ in range(3)]


def a_hook_that_comes_later(door: Door) -> Any:
    module = around(lambda self, x: self.child(self.h(x)))
    module.child = nn.ReLU()
    call = door(module, X)
    answers = [call(X).clone()]
    handle = module.child.register_forward_hook(lambda _, __, output: output * 3)
    answers += [call(X).clone() for _ in range(3)]
    handle.remove()
    return [*answers, *(call(X).clone() for _ in range(3))]


SCENES: tuple[Scene, ...] = scenes_of(globals())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_what_is_done_is_done_once_a_call(scene: Scene, door: str, tmp_path: Path) -> None:
    check(scene, door, tmp_path)


def test_there_are_enough_scenes() -> None:
    assert len(SCENES) >= 17
