"""A convolution runs as a product of its windows where that is right and faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import trace_program
from torch_cudal1.core import telemetry
from torch_cudal1.ir.ops.window_steps import read_windows
from torch_cudal1.ir.program import Program
from torch_cudal1.search import convolution_choice, operator_timing
from torch_cudal1.search.convolution_choice import choose_convolutions
from torch_cudal1.search.operator_timing import OperatorChoice

CPU = torch.device("cpu")


@pytest.fixture
def program() -> Program:
    """Two patch embeddings of one form, and a convolution that stays."""
    image, weight = torch.randn(1, 3, 8, 8).bfloat16(), torch.randn(6, 3, 4, 4).bfloat16()
    other, small = torch.randn(6, 3, 4, 4).bfloat16(), torch.randn(2, 3, 3, 3).bfloat16()
    return trace_program(
        lambda x, w, v, u: (
            F.conv2d(x, w, stride=4) + F.conv2d(x, v, stride=4),
            F.conv2d(x, u, padding=1),
        ),
        (image, weight, other, small),
    )


def choose(
    program: Program, monkeypatch: pytest.MonkeyPatch, convolution_us: float, product_us: float
) -> tuple[OperatorChoice, int]:
    """The choice at these times, and how often they were measured."""
    timed: list[set[str]] = []

    def time(graphs: dict[str, Any]) -> dict[str, float]:
        timed.append(set(graphs))
        return {"convolution": convolution_us, "product": product_us}

    monkeypatch.setattr(operator_timing, "_capture", lambda run, _: run)
    monkeypatch.setattr(operator_timing, "_time_graphs", time)
    choice = convolution_choice._choose_each(program, read_windows(program), CPU)
    assert all(names == {"convolution", "product"} for names in timed)
    return choice, len(timed)


def test_the_faster_form_runs_and_each_is_measured_once(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, measured = choose(program, monkeypatch, 50.0, 8.0)
    assert measured == 1
    assert choice.techniques == ("convolution as product",)
    assert not read_windows(choice.program)
    inputs = [torch.randn(spec.shape).to(torch.bfloat16) for spec in program.inputs]
    for result, expected in zip(
        operator_timing.prepare(choice.program, CPU)(inputs),
        operator_timing.prepare(program, CPU)(inputs),
        strict=True,
    ):
        torch.testing.assert_close(result, expected)


def test_other_strides_are_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one shape in and out, with padding and without."""
    signal, weight = torch.randn(1, 2, 4).bfloat16(), torch.randn(3, 2, 2).bfloat16()
    program = trace_program(
        lambda x, w, v: (
            F.conv1d(x, w, stride=2),
            F.conv1d(x, v, stride=3, padding=1),
        ),
        (signal, weight, weight.clone()),
    )
    assert choose(program, monkeypatch, 50.0, 8.0)[1] == 2


def test_what_is_as_fast_within_noise_stays(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(program, monkeypatch, 8.2, 8.0) == (OperatorChoice(program), 1)


def test_a_model_that_has_none_and_a_cpu_are_left_alone(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("nothing is measured here")

    monkeypatch.setattr(convolution_choice, "_choose_each", refuse)
    assert choose_convolutions(program, CPU) == OperatorChoice(program)
    plain = trace_program(lambda x: x.exp(), (torch.randn(3),))
    assert choose_convolutions(plain, torch.device("cuda")) == OperatorChoice(plain)


def test_where_nothing_can_be_measured_the_convolution_stays(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(convolution_choice, "_choose_each", fail)
    assert choose_convolutions(program, torch.device("cuda")) == OperatorChoice(program)
    (event,) = [
        each
        for each in telemetry.report().events
        if each.what == "convolution" and "failed" in each.facts
    ]
    assert event.facts["failed"] == "RuntimeError: no GPU"
