"""Forms of one computation are timed side by side; what computes something else is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core import telemetry
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.search import operator_timing
from torch_cudal1.search.operator_timing import draw_operands, find_fastest_form

CPU = torch.device("cpu")
X = torch.randn(64).bfloat16()


def make_form(function: Any) -> Program:
    return trace_program(function, (X,))


FORMS = {
    "own": make_form(lambda x: x * 2),
    "sum": make_form(lambda x: x + x),
    "wrong": make_form(lambda x: x * 2.2),
    "without NaN": make_form(lambda x: torch.nan_to_num(x, 0.0) * 2),
}


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Microseconds by name, to be set."""
    medians_us: dict[str, float] = {}
    monkeypatch.setattr(operator_timing, "_capture", lambda run, _: run)
    monkeypatch.setattr(
        operator_timing, "_time_graphs", lambda graphs: {name: medians_us[name] for name in graphs}
    )
    return medians_us


def test_the_fastest_of_those_that_are_right_wins(times: dict[str, float]) -> None:
    times |= {"own": 10.0, "sum": 5.0, "wrong": 1.0, "without NaN": 1.0}
    with_nan = X.clone()
    with_nan[3] = float("nan")
    assert find_fastest_form(FORMS, "own", [[X], [with_nan]], "test") == "sum"
    (event,) = [
        each for each in telemetry.report().events if each.what == "test" and "runs" in each.facts
    ]
    assert event.facts["medians_us"] == {"own": 10.0, "sum": 5.0}


def test_a_gain_within_noise_is_none(times: dict[str, float]) -> None:
    times |= {"own": 10.0, "sum": 9.6}
    assert find_fastest_form({name: FORMS[name] for name in times}, "own", [[X]], "test") == "own"


def test_a_form_that_fails_costs_itself_only(
    times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times |= {"own": 10.0, "sum": 5.0, "without NaN": 20.0}
    own_prepare = operator_timing.prepare

    def prepare(program: Program, device: torch.device) -> Any:
        if program is FORMS["wrong"]:
            raise RuntimeError("no plan for this shape")
        return own_prepare(program, device)

    monkeypatch.setattr(operator_timing, "prepare", prepare)
    assert find_fastest_form(FORMS, "own", [[X]], "test") == "sum"
    (event,) = [
        each for each in telemetry.report().events if each.what == "test" and "failed" in each.facts
    ]
    assert event.facts["failed"] == "wrong: no plan for this shape"


def test_operands_have_their_layouts_and_are_the_same_each_time() -> None:
    specs = [
        TensorSpec("bfloat16", (4, 6), (1, 4), "cpu"),
        TensorSpec("float32", (3, 5), (0, 1), "cpu"),
    ]
    first, second = draw_operands(specs, CPU), draw_operands(specs, CPU)
    for spec, tensor, again in zip(specs, first, second, strict=True):
        assert (tensor.shape, tensor.stride()) == (spec.shape, spec.strides)
        assert tensor.dtype == spec.torch_dtype
        assert torch.equal(tensor, again)
    assert first[1].std() > 0.1
