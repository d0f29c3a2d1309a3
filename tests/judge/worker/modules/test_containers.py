"""What a call does to the containers that it is handed is told, alike for the same change."""

from __future__ import annotations

import torch

from torch_cudal1.judge.wire.call_spec import pack_arguments
from torch_cudal1.judge.worker.modules.containers import (
    describe_change,
    has_containers,
    list_members,
)


def test_an_emptied_list_is_told_and_one_that_stays_is_not() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    arguments = {"args": ([a, b], 3), "kwargs": {"key": {"c": a}}}
    before = list_members(arguments)
    assert describe_change(before, list_members(arguments)) == ""
    arguments["args"][0].pop()
    change = describe_change(before, list_members(arguments))
    assert "its arguments become" in change
    arguments["args"][0].append(torch.ones(1))
    assert "new" in describe_change(before, list_members(arguments)) != change


def test_only_calls_with_containers_are_looked_at() -> None:
    x = torch.ones(1)
    for args, expected in (((x, 2), False), (([x],), True), (({"a": x},), True)):
        packed = pack_arguments({"args": args, "kwargs": {}}, [])
        assert has_containers(packed) == expected
