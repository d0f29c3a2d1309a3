"""The static check: each rule refuses the Program that breaks it, and names itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.aten import is_random
from torch_cudal1.ir.check import check_program, is_random_program
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, LaunchArg, Program, TensorSpec, Value

CPU = TensorSpec("float32", (4, 8), (8, 1), "cpu")
GPU = TensorSpec("float32", (4, 8), (8, 1), "cuda")
RELU = Aten("aten.relu.default", (Value(0),), (), (1,))
LAUNCH = Launch(
    "k", "kernel", (2, 1, 1), 128, 0, (LaunchArg("ptr", Value(0)), LaunchArg("ptr", Value(1)))
)
GOOD = Program((CPU,), (RELU,), (1,))
KERNEL = Program(
    (GPU,), (Alloc(1, GPU), LAUNCH), (1,), payloads={"k": torch.zeros(4, dtype=torch.uint8)}
)
VIEW = Aten("aten.t.default", (Value(1),), (), (2,))
TWO_VIEWS = (*LAUNCH.args, LaunchArg("ptr", Value(2)))


def with_step(**changes):
    return replace(GOOD, steps=(replace(RELU, **changes),))


def with_launch(**changes):
    return replace(KERNEL, steps=(KERNEL.steps[0], replace(LAUNCH, **changes)))


BROKEN = [
    ("aten", with_step(target="aten.relu_.default"), "writes"),
    ("aten", with_step(target="aten.no_such_op.default"), "no operator"),
    ("aten", with_step(target="os.system.default"), "namespace"),
    ("aten", with_step(target="mkldnn._linear_pointwise.default"), "namespace"),
    ("aten", with_step(target="aten.add.out"), "writes"),
    ("order", with_step(args=(Value(5),)), "before it exists"),
    ("order", with_step(args=(Value(1),)), "before it exists"),
    ("order", with_step(args=((Value(-1),),)), "before it exists"),
    ("numbering", with_step(outs=(3,)), "expected 1"),
    ("outputs", replace(GOOD, outputs=(9,)), "no value"),
    ("outputs", replace(GOOD, outputs=(-1,)), "no value"),
    ("dtype", replace(GOOD, inputs=(replace(CPU, dtype="load"),)), "not a torch dtype"),
    ("inputs", replace(GOOD, inputs=(replace(CPU, shape=(-4, 8)),)), "impossible"),
    ("inputs", replace(GOOD, inputs=(replace(CPU, device="meta"),)), "device"),
    ("constants", replace(GOOD, constants=("c",)), "payload"),
    ("launch", with_launch(payload="other"), "payload"),
    ("launch", with_launch(grid=(0, 1, 1)), "grid"),
    ("launch", with_launch(grid=(1, 70_000, 1)), "grid"),
    ("launch", with_launch(grid=(-1, 1, 1)), "grid"),
    ("launch", with_launch(grid=(2**31, 1, 1)), "grid"),
    ("launch", with_launch(grid=(1, 1, 2**63)), "grid"),
    ("launch", with_launch(block=2048), "threads"),
    ("launch", with_launch(block=-32), "threads"),
    ("launch", with_launch(block=33), "threads"),
    ("launch", with_launch(shared_bytes=300_000), "shared"),
    ("launch", with_launch(shared_bytes=-1), "shared"),
    ("launch", with_launch(cluster=17), "cluster"),
    ("launch", with_launch(args=(LaunchArg("ptr", Value(0)),)), "nowhere to write"),
    ("launch", with_launch(args=(*LAUNCH.args, LaunchArg("i32", 2**40))), "argument i32"),
    ("launch", with_launch(args=(*LAUNCH.args, LaunchArg("i32", -(2**31) - 1))), "argument i32"),
    ("launch", with_launch(args=(*LAUNCH.args, LaunchArg("i64", 2**63))), "argument i64"),
    ("launch", with_launch(args=(*LAUNCH.args, LaunchArg("ptr", 4096))), "argument ptr"),
    (
        "alloc",
        replace(KERNEL, steps=(Alloc(1, replace(GPU, shape=(2**50, 8))), LAUNCH)),
        "impossible",
    ),
    (
        "alloc",
        replace(KERNEL, steps=(Alloc(1, replace(GPU, strides=(2**40, 1))), LAUNCH)),
        "impossible",
    ),
    (
        "alloc",
        replace(KERNEL, steps=(Alloc(1, replace(GPU, strides=(0, 1))), LAUNCH)),
        "share memory",
    ),
    (
        "alloc",
        replace(KERNEL, steps=(Alloc(1, replace(GPU, strides=(4, 1))), LAUNCH)),
        "share memory",
    ),
    (
        "launch",
        replace(KERNEL, steps=(KERNEL.steps[0], VIEW, replace(LAUNCH, args=TWO_VIEWS))),
        "values 1 and 2 are the same memory",
    ),
    ("call", replace(GOOD, steps=(Call(GOOD, (0, 0), (1,)),)), "fit the callee"),
    (
        "call",
        replace(GOOD, steps=(Call(replace(GOOD, outputs=(None,)), (0,), (1,)),)),
        "tensor for every output",
    ),
]


@pytest.mark.parametrize(
    ("rule", "program", "words"), BROKEN, ids=[f"{b[0]}-{i}" for i, b in enumerate(BROKEN)]
)
def test_a_program_that_breaks_a_rule_is_refused_by_it(rule, program, words):
    with pytest.raises(ProgramError, match=words) as caught:
        check_program(program)
    assert caught.value.rule == rule


SOUND = [
    GOOD,
    KERNEL,
    replace(GOOD, steps=(Call(GOOD, (0,), (1,)),)),
    replace(KERNEL, steps=(Alloc(1, replace(GPU, strides=(1, 4))), LAUNCH)),
    replace(KERNEL, steps=(Alloc(1, replace(GPU, shape=(1, 8), strides=(0, 1))), LAUNCH)),
    replace(KERNEL, steps=(Alloc(1, replace(GPU, shape=(0, 8), strides=(0, 0))), LAUNCH)),
    replace(
        KERNEL,
        steps=(KERNEL.steps[0], replace(LAUNCH, args=(*LAUNCH.args, LaunchArg("ptr", Value(1))))),
    ),
]


@pytest.mark.parametrize("program", SOUND)
def test_a_sound_program_passes(program):
    check_program(program)


RANDOM = [
    ("aten.rand_like.default", (Value(0),), True),
    ("aten.native_dropout.default", (Value(0), 0.5, True), True),
    ("aten.native_dropout.default", (Value(0), 0.5, False), False),
    (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (Value(0), Value(0), Value(0), 0.0),
        False,
    ),
    (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (Value(0), Value(0), Value(0), 0.1),
        True,
    ),
    (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (Value(0), Value(0), Value(0)),
        False,
    ),
    ("aten.relu.default", (Value(0),), False),
]


@pytest.mark.parametrize(("target", "args", "random"), RANDOM)
def test_random_is_what_draws_numbers_with_these_arguments(target, args, random):
    assert is_random(target, args) is random


def test_a_nested_random_step_makes_the_whole_random():
    inner = Program((CPU,), (Aten("aten.rand_like.default", (Value(0),), (), (1,)),), (1,))
    assert is_random_program(Program((CPU,), (Call(inner, (0,), (1,)),), (1,)))
    assert not is_random_program(GOOD)
