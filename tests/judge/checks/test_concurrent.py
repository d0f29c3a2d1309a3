"""Instances and threads beside each other do not disturb their results."""

from __future__ import annotations

import pytest

from tests.judge.checks.module_sources import ModuleBench, ModuleCase
from torch_cudal1.judge.checks.concurrent import CAPTURE, REENTRANCY, STREAM_ORDER

SHARED = "BOX['x'] = x + y\nfor _ in range(200): torch.relu(x)"
MODULES: dict[str, ModuleCase] = {
    "scratch shared by all calls": (
        {"top": "BOX = {}", "before": SHARED, "result": "self.plain(BOX['x'], 0 * y)"},
        "standard",
        (REENTRANCY,),
        "reentrancy",
    ),
    "scratch of its own": (
        {"before": "z = x + y"},
        "standard",
        (REENTRANCY, STREAM_ORDER, CAPTURE),
        None,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_scratch_memory_that_calls_share_is_refused_and_an_honest_source_passes(
    module_bench: ModuleBench, name: str
) -> None:
    module_bench.assert_verdict(MODULES[name])
