"""One attention operator in place of another: the same inputs, and a result in the same layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.ops.attention_steps import (
    KINDS,
    make_alone,
    read_attention,
    replace_attention,
)
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.value_specs import output_specs, value_specs

BATCH, HEADS, ROWS, SIZE = 2, 4, 16, 8
SHAPE = (BATCH, HEADS, ROWS, SIZE)
# As a projection leaves it: heads inside rows.
STRIDES = (ROWS * HEADS * SIZE, SIZE, HEADS * SIZE, 1)
RESULTS = {"flash": 9, "cudnn": 9, "efficient": 4}


def make_program(
    kind: str,
    *,
    device: str = "cuda",
    biased: bool = False,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    read: Sequence[int] = (0,),
) -> Program:
    """Attention by `kind`, whose rows are put together again by a view, as models do."""
    operand = TensorSpec("bfloat16", SHAPE, STRIDES, device)
    # Only cuDNN's operator broadcasts a bias: for the others PyTorch expands it.
    heads, between = (1, ROWS * ROWS) if kind == "cudnn" else (HEADS, 0)
    bias = TensorSpec(
        "bfloat16", (BATCH, heads, ROWS, ROWS), (ROWS * ROWS, between, ROWS, 1), device
    )
    inputs = (operand, operand, operand, *([bias] if biased else []))
    first = len(inputs)
    options: tuple[Any, ...] = (dropout, causal)
    if kind != "flash":
        options = (Value(3) if biased else None, False, *options)
    outs = tuple(range(first, first + RESULTS[kind]))
    attention = Aten(
        f"aten._scaled_dot_product_{kind}_attention.default",
        (Value(0), Value(1), Value(2), *options),
        () if scale is None else (("scale", scale),),
        outs,
        True,
    )
    number = outs[-1] + 1
    rows = Aten("aten.permute.default", (Value(first), (0, 2, 1, 3)), (), (number,))
    view = (BATCH, ROWS, HEADS * SIZE)
    flat = Aten("aten.reshape.default", (Value(number), view), (), (number + 1,))
    outputs = (number + 1, *(first + index for index in read if index))
    return Program(inputs, (attention, rows, flat), outputs)


@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("biased", [False, True])
def test_another_operator_gives_a_result_in_the_same_layout(
    old: str, new: str, biased: bool
) -> None:
    if biased and old == "flash":
        pytest.skip("flash attention has no bias")
    program = make_program(old, biased=biased, causal=not biased, scale=0.3)
    (attention,) = read_attention(program).values()
    assert (attention.kind, attention.is_causal, attention.scale) == (old, not biased, 0.3)
    specs = value_specs(program)
    replaced = replace_attention(program, {0: new}, specs)
    if biased and new == "flash":
        assert replaced is None
        return
    assert replaced is not None
    check_program(replaced)
    assert output_specs(replaced) == output_specs(program)
    (again,) = read_attention(replaced).values()
    if biased and (old, new) == ("cudnn", "efficient"):
        assert replaced.steps[0].target == "aten.expand.default"
        assert value_specs(replaced)[again.operands[3]].shape == (BATCH, HEADS, ROWS, ROWS)
        again = replace(again, operands=attention.operands)
    assert again == replace(attention, kind=new)
    out = specs[len(program.inputs)]
    alone = make_alone(attention, new, specs, out)
    assert alone is not None
    check_program(alone)
    assert output_specs(alone) == [out]


@pytest.mark.parametrize(
    "program",
    [
        make_program("efficient", dropout=0.1),
        # The log-sum-exp of the rows, as a training step keeps it.
        make_program("cudnn", read=(0, 1)),
    ],
)
def test_training_and_dropout_keep_their_operator(program: Program) -> None:
    assert read_attention(program) == {}


def test_what_no_copy_lays_out_keeps_its_operator() -> None:
    program = make_program("flash")
    (attention,) = read_attention(program).values()
    specs = value_specs(program)
    gaps = replace(specs[3], strides=tuple(2 * stride for stride in specs[3].strides))
    assert make_alone(attention, "cudnn", specs, gaps) is None
    assert make_alone(attention, "flash", specs, gaps) is not None


def test_default_arguments_may_be_left_out() -> None:
    program = make_program("flash")
    step = program.steps[0]
    assert isinstance(step, Aten)
    short = replace(program, steps=(replace(step, args=step.args[:3]), *program.steps[1:]))
    assert read_attention(short) == read_attention(program)
