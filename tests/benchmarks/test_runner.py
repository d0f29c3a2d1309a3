"""The runner reports what a contender did, wrong and crashing ones included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.models import Inputs, build
from benchmarks.runner import (
    Case,
    Contender,
    Phase,
    Row,
    StartedContender,
    compute_references,
    measure_contenders,
    start_contender,
)
from tests.virtual_clock import install_virtual_clock


def _make_case(phase: Phase = "inference", name: str = "lstm") -> Case:
    return Case(build(name, sizes="small", device="cpu"), phase)


def _wrap_output(
    change: Callable[[Tensor], Tensor],
) -> Callable[[nn.Module, Inputs], Callable[..., Any]]:
    return lambda module, _: lambda *inputs: change(module(*inputs))


def _remembers_the_first(module: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    answer: Tensor = module(*inputs)
    return lambda *_: answer


def _raises(module: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    raise RuntimeError("no kernel\nfor this device")


def _drops_a_bias(module: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    with torch.no_grad():
        module.get_parameter("head.bias").zero_()
    return module


def _breaks_later(module: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    """Right for the first calls, wrong once it is being timed."""
    calls = 0

    def call(*inputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        output: Tensor = module(*inputs)
        return output if calls < 10 else torch.zeros_like(output)

    return call


def _crashes_later(module: nn.Module, inputs: Inputs) -> Callable[..., Any]:
    """Right when verified at the start, then gone."""
    calls = 0

    def call(*inputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("out of memory")
        output: Tensor = module(*inputs)
        return output

    return call


def _measure_rows(case: Case, *contenders: Contender) -> dict[str, Row]:
    refs = compute_references(case)
    started = [start_contender(case, contender, refs) for contender in contenders]
    lives = [contender for contender in started if isinstance(contender, StartedContender)]
    rows = measure_contenders(case, lives, refs, rounds=14, eager="eager", compiled="torch.compile")
    return {
        row.contender: row
        for row in [*rows, *(contender for contender in started if isinstance(contender, Row))]
    }


EAGER = Contender("eager", lambda module, _: module, baseline=True)
WRONG = {
    "zeros": _wrap_output(torch.zeros_like),
    "bf16": _wrap_output(lambda y: y.bfloat16().float()),
    "remembers": _remembers_the_first,
    "drops a bias": _drops_a_bias,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_contender_is_a_row_without_a_time(name: str) -> None:
    row = _measure_rows(_make_case(), EAGER, Contender(name, WRONG[name]))[name]
    assert (row.status, row.verified, row.median_us, row.vs_eager) == ("wrong", False, None, None)
    assert row.reason.startswith("output:")


def test_a_right_contender_is_verified_and_timed_against_eager() -> None:
    rows = _measure_rows(_make_case(), EAGER, Contender("same", lambda module, _: module))
    assert [row.status for row in rows.values()] == ["ok", "ok"]
    ratio = rows["same"].vs_eager
    assert ratio is not None
    assert ratio["low"] <= ratio["speedup"] <= ratio["high"]
    assert ratio["low"] > 0  # how much it is depends on who else uses the machine
    assert rows["same"].error_ratio == 1.0
    assert rows["eager"].vs_eager is None
    assert rows["same"].vs_compile is None


def test_a_slower_contender_shows_as_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = install_virtual_clock(monkeypatch)

    def make_contender(name: str, takes_us: float) -> Contender:
        def start(module: nn.Module, _: Inputs) -> Callable[..., Any]:
            def call(*inputs: Tensor) -> Any:
                clock.advance(takes_us)
                return module(*inputs)

            return call

        return Contender(name, start, baseline=name == "eager")

    eager, late = make_contender("eager", 1e5), make_contender("late", 4e5)
    ratio = _measure_rows(_make_case(), eager, late)["late"].vs_eager
    assert ratio is not None
    assert ratio["speedup"] == 0.25


def test_a_crashing_contender_is_a_row_with_the_reason() -> None:
    rows = _measure_rows(_make_case(), EAGER, Contender("crash", _raises))
    assert (rows["crash"].status, rows["crash"].reason) == (
        "failed",
        "RuntimeError: no kernel for this device",
    )
    assert rows["eager"].status == "ok"


def test_a_contender_that_turns_wrong_while_it_is_timed_is_caught() -> None:
    row = _measure_rows(_make_case(), EAGER, Contender("later", _breaks_later))["later"]
    assert (row.status, row.verified) == ("wrong", False)


def test_a_contender_that_crashes_after_its_verification_is_a_failed_row() -> None:
    row = _measure_rows(_make_case(), EAGER, Contender("later", _crashes_later))["later"]
    assert (row.status, row.reason, row.median_us) == (
        "failed",
        "RuntimeError: out of memory",
        None,
    )


def test_a_wrong_baseline_keeps_its_time_because_it_is_the_denominator() -> None:
    rows = _measure_rows(
        _make_case(),
        Contender("eager", WRONG["bf16"], baseline=True),
        Contender("same", lambda module, _: module),
    )
    assert rows["eager"].status == "wrong"
    assert rows["eager"].median_us is not None
    assert rows["same"].vs_eager is not None


@pytest.mark.parametrize("name", ["lstm", "resnet50", "bert_base"])
def test_in_training_the_loss_and_every_gradient_are_compared(name: str) -> None:
    case = _make_case("train", name)
    row = _measure_rows(case, EAGER)["eager"]
    assert row.status == "ok", row.reason
    # two draws, and once more after the timing
    assert row.outputs == 3 * (1 + len(list(case.workload.module.parameters())))


def test_a_detached_output_fails_the_training_step() -> None:
    row = _measure_rows(
        _make_case("train"),
        EAGER,
        Contender("detached", _wrap_output(lambda y: y.detach().requires_grad_())),
    )["detached"]
    assert row.status == "failed"
    assert "no gradient for" in row.reason


def test_a_wrong_gradient_is_caught_though_the_loss_is_right() -> None:
    def scale_gradient(y: Tensor) -> Tensor:
        return y.detach() + 1.01 * (y - y.detach())

    row = _measure_rows(
        _make_case("train"), EAGER, Contender("scaled", _wrap_output(scale_gradient))
    )["scaled"]
    assert row.status == "wrong"
    assert not row.reason.startswith("loss")


def test_contenders_do_not_share_weights() -> None:
    case = _make_case()
    first, second = case.copy(), case.copy()
    with torch.no_grad():
        first.get_parameter("head.bias").add_(1.0)
    assert not torch.equal(first.get_parameter("head.bias"), second.get_parameter("head.bias"))
    assert torch.equal(
        second.get_parameter("head.bias"), case.workload.module.get_parameter("head.bias")
    )


def test_the_phase_sets_train_mode_and_gradients() -> None:
    for phase, grad in (("inference", False), ("train", True)):
        case = _make_case(phase)  # type: ignore[arg-type]
        assert case.copy().training is grad
        with case.mode():
            assert torch.is_grad_enabled() is grad


def test_a_row_is_plain_data() -> None:
    row = _measure_rows(_make_case(), EAGER)["eager"]
    assert Row(**asdict(row)) == row
