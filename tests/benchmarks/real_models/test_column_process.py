"""How far two results lie apart, and what a sample is."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.real_models.column_process import (
    MIN_SAMPLES,
    PreparedColumn,
    describe_floor,
    list_search_steps,
    profile_column,
    relative_difference,
    sample_calls,
)
from torch_cudal1.core import telemetry

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("outputs", "expected", "difference"),
    [
        ([torch.ones(4)], [torch.ones(4)], 0.0),
        ([torch.ones(4), torch.ones(2)], [torch.ones(4), torch.full((2,), 2.0)], 0.5),
        ([torch.ones(4)], [torch.ones(5)], math.inf),
        ([torch.ones(4)], [], math.inf),
        ([torch.full((4,), 0.5)], [torch.zeros(4)], 1.0),
    ],
)
def test_the_largest_difference_of_all_outputs_counts(outputs, expected, difference) -> None:
    assert relative_difference(outputs, expected) == pytest.approx(difference)


def test_a_search_says_what_it_did_and_when() -> None:
    events = [
        telemetry.Event("resolve", "miss", "key", {"reason": "none"}, 1.0),
        telemetry.Event("judge", "baselines", "key", {"best": "eager", "failures": {}}, 2.0),
        telemetry.Event("judge", "rejected", "key", {"label": "gemm", "reason": "slow"}, 4.55),
    ]
    assert list_search_steps(events) == [
        {"s": 0.0, "what": "baselines", "best": "eager"},
        {"s": 2.5, "what": "rejected", "label": "gemm", "reason": "slow"},
    ]
    assert list_search_steps([]) == []


def test_what_a_call_moved_is_put_back_before_each_sample() -> None:
    steps: list[str] = []
    module = torch.nn.Identity()
    column = PreparedColumn(
        lambda: steps.append("call"), lambda: steps.append("put back"), module, (), {}
    )
    samples = sample_calls(column, CPU, 0.0)
    assert len(samples) == MIN_SAMPLES
    assert steps == ["put back", "call"] * MIN_SAMPLES
    assert all(us > 0 for us in samples)


def test_a_floor_is_asked_of_the_own_forward_in_its_dtype() -> None:
    steps: list[str] = []
    module = torch.nn.Linear(8, 4).to(torch.bfloat16)
    inputs = (torch.randn(2, 8, dtype=torch.bfloat16),)
    column = PreparedColumn(
        lambda: module(*inputs), lambda: steps.append("put back"), module, inputs, {}
    )
    floor = describe_floor(column, CPU)["floor"]
    assert floor["flops"] == 2 * 2 * 8 * 4
    assert floor["us"] > 0
    assert floor["bytes_per_s"] > 0
    assert steps == ["put back"]
    assert profile_column(column, CPU) == {"profile": {"busy_us": 0, "kernels": [], "other_us": 0}}
