"""The fastest attention operator runs, if it computes what PyTorch's choice computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.ir.test_attention_steps import RESULTS, make_program
from torch_cudal1.core import telemetry
from torch_cudal1.ir.ops.attention_steps import KINDS, read_attention
from torch_cudal1.ir.program import Program
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.search import attention_choice, operator_timing
from torch_cudal1.search.attention_choice import choose_attention
from torch_cudal1.search.operator_timing import OperatorChoice

CPU = torch.device("cpu")


def compute(kind: str, change: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """An operator for CPUs, which have none of the three; `change` makes it another one."""

    # PyTorch leaves out arguments that are the defaults.
    def attend(query: Any, key: Any, value: Any, *options: Any, scale: Any = None) -> Any:
        defaults = (0.0, False) if kind == "flash" else (None, False, 0.0, False)
        *bias_part, dropout, is_causal = (*options, *defaults[len(options) :])[: len(defaults)]
        bias = bias_part[0] if bias_part else None
        assert not dropout
        result = torch.nn.functional.scaled_dot_product_attention(
            query.float(),
            key.float(),
            value.float(),
            None if bias is None else bias.float(),
            is_causal=is_causal,
            scale=scale,
        )
        out = change(result, bias).to(query.dtype)
        # In a layout of its own: a step behind it expects that of the operator before.
        # Among the others are the numbers of rows and keys.
        others = [
            torch.empty(0) if kind == "efficient" or n not in (4, 5) else 0
            for n in range(1, RESULTS[kind])
        ]
        return (out.contiguous(), *others)

    return attend


CHANGES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {}


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The three operators on the CPU, and no CUDA graph around them."""
    library = torch.library.Library("aten", "IMPL")
    CHANGES.clear()
    for kind in KINDS:

        def call(*args: Any, kind: str = kind, **kwargs: Any) -> Any:
            return compute(kind, CHANGES.get(kind, lambda result, _: result))(*args, **kwargs)

        library.impl(f"_scaled_dot_product_{kind}_attention", call, "CPU")
    monkeypatch.setattr(operator_timing, "_capture", lambda run, _: run)
    monkeypatch.setattr(attention_choice, "_is_allowed", lambda *_: True)
    yield
    library._destroy()


def choose(program: Program, monkeypatch: pytest.MonkeyPatch, **times: float) -> OperatorChoice:
    """The choice where the operators take these microseconds; the others are refused before."""
    timed: list[set[str]] = []

    def time(graphs: dict[str, Any]) -> dict[str, float]:
        timed.append(set(graphs))
        return {kind: times[kind] for kind in graphs}

    monkeypatch.setattr(operator_timing, "_time_graphs", time)
    choice = attention_choice._choose_each(program, read_attention(program), CPU)
    assert timed == [set(times)]
    return choice


@pytest.mark.parametrize("biased", [False, True])
def test_the_fastest_runs_and_computes_the_same(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_program("efficient", device="cpu", biased=biased, causal=not biased, scale=0.4)
    times = {"efficient": 10.0, "cudnn": 5.0, **({} if biased else {"flash": 7.0})}
    before = torch.random.get_rng_state()
    choice = choose(program, monkeypatch, **times)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert choice.techniques == ("cudnn attention",)
    assert [step.kind for step in read_attention(choice.program).values()] == ["cudnn"]
    inputs = [
        torch.randn(100_000).to(torch.bfloat16).as_strided(spec.shape, spec.strides)
        for spec in program.inputs
    ]
    run, own = (prepare(each, CPU)(inputs)[0] for each in (choice.program, program))
    torch.testing.assert_close(run, own)


def test_what_is_as_fast_within_noise_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    program = make_program("flash", device="cpu")
    choice = choose(program, monkeypatch, flash=10.0, cudnn=9.7, efficient=20.0)
    assert choice == OperatorChoice(program)


def hide_rows(result: torch.Tensor, bias: Any) -> torch.Tensor:
    """Zeros in place of NaN where a mask hides every key of a row."""
    return result.nan_to_num(0.0) if bias is not None else result


@pytest.mark.parametrize(
    "change",
    [
        lambda result, _: 1.05 * result,
        lambda result, _: result.nan_to_num(0.0),
        hide_rows,
    ],
)
def test_an_operator_that_computes_something_else_is_not_timed(
    change: Callable[[torch.Tensor, Any], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    CHANGES["cudnn"] = change
    program = make_program("efficient", device="cpu", biased=True)
    assert choose(program, monkeypatch, efficient=10.0) == OperatorChoice(program)


def test_an_operator_that_fails_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no plan for this shape")

    CHANGES["cudnn"] = fail
    program = make_program("flash", device="cpu")
    choice = choose(program, monkeypatch, flash=10.0, efficient=5.0)
    assert choice.techniques == ("efficient attention",)
    (event,) = [
        each
        for each in telemetry.report().events
        if each.what == "attention" and "failed" in each.facts
    ]
    assert event.facts["failed"] == "cudnn: no plan for this shape"


def test_off_a_gpu_and_where_nothing_can_be_measured_pytorch_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = make_program("flash")
    assert choose_attention(program, CPU) == OperatorChoice(program)
    # No CUDA here, or no memory left.
    monkeypatch.setattr(
        attention_choice, "_choose_each", lambda *_: (_ for _ in ()).throw(RuntimeError("no GPU"))
    )
    assert choose_attention(program, torch.device("cuda")) == OperatorChoice(program)
