"""Which scalars of a constructor are changed, one at a time, and how a tensor moves."""

from __future__ import annotations

import torch

from torch_cudal1.judge.checks.module_semantics.parameters import (
    _list_scalars,
    _measure_difference,
    _nudge,
)


def test_each_number_and_flag_is_changed_alone() -> None:
    init = {"args": [64, 0.5, True], "kwargs": {"eps": 0.0}}
    changed = dict(_list_scalars(init))
    assert [name.split(" = ")[0] for name in changed] == [
        "args.0",
        "args.1",
        "args.2",
        "kwargs.eps",
    ]
    assert [changed[name] for name in changed] == [
        {"args": [65, 0.5, True], "kwargs": {"eps": 0.0}},
        {"args": [64, 0.75, True], "kwargs": {"eps": 0.0}},
        {"args": [64, 0.5, False], "kwargs": {"eps": 0.0}},
        {"args": [64, 0.5, True], "kwargs": {"eps": 0.1}},
    ]
    assert init == {"args": [64, 0.5, True], "kwargs": {"eps": 0.0}}


def test_a_nudge_moves_every_element_by_a_tenth_to_twice_and_keeps_the_strides() -> None:
    tensor = torch.tensor([[0.0, 2.0], [-4.0, 8.0]]).t()
    moved = _nudge(tensor)
    assert moved.stride() == tensor.stride()
    share = (moved - tensor).abs() / tensor.abs().clamp_min(1.0)
    assert bool(((share >= 0.1) & (share <= 1.0)).all())


def test_a_change_that_is_not_reproduced_exceeds_its_limit() -> None:
    before, after = torch.zeros(64), torch.ones(64)
    exact = [before.double(), after.double()]
    reproduced = _measure_difference([before, after], [before, after], exact)
    dropped = _measure_difference([before, before], [before, after], exact)
    assert reproduced is not None
    assert dropped is not None
    assert reproduced.is_visible
    assert reproduced.error <= reproduced.limit < dropped.error
