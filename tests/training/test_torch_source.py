"""Rendered PyTorch modules: right programs match float64, and broken ones break where they are
meant to.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.training.ksl_cases import CPU, run_module, task_for
from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.training.ksl.grammar import KslProgram
from torch_cudal1.training.ksl.ops import OPS

WRONG = {"acc=f16", "fuse=swapped", "axis=swapped", "epilogue=swapped", "carry=off"}


def inputs_of(task: TrainingTask) -> list[torch.Tensor]:
    names: dict[str, Any] = {}
    exec(compile(task.reference, "<reference>", "exec"), names)
    torch.manual_seed(0)
    return list(names["get_inputs"]())


def is_designed_wrong(program: KslProgram) -> bool:
    return bool(WRONG & set(program.text.split()))


@pytest.mark.parametrize("name", sorted(OPS))
def test_right_programs_match_float64_on_ragged_shapes_and_wrong_ones_do_not(name: str) -> None:
    task = task_for(name)
    inputs = inputs_of(task)
    exact = run_module(
        task.reference,
        "Model",
        [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs],
    )
    eager = run_module(task.reference, "Model", inputs)
    honest = [program for program in CPU.programs(task) if not program.hack]
    for program in random.Random(name).sample(honest, 16):
        decoded = CPU.decode(task, program.text)
        assert isinstance(decoded, Decoded)
        result = run_module(decoded.source, "ModelNew", inputs)
        assert (result.shape, result.dtype, result.stride()) == (
            eager.shape,
            eager.dtype,
            eager.stride(),
        )
        close = torch.allclose(result.double(), exact, rtol=2e-4, atol=2e-5)
        if program.knobs.get("mask", "on") == "on" and not is_designed_wrong(program):
            assert close, f"{program.text}: off by {float((result.double() - exact).abs().max())}"
        elif is_designed_wrong(program) and not (
            name == "max_pool1d" or program.knobs.get("block") == "256"
        ):
            assert not close, f"{program.text} is meant to be wrong"


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_program_without_its_mask_leaves_out_the_rest_of_a_ragged_shape(name: str) -> None:
    task = task_for(name)
    inputs = inputs_of(task)
    broken = 0
    for program in CPU.programs(task):
        if program.knobs.get("mask") == "off" and not is_designed_wrong(program):
            decoded = CPU.decode(task, program.text)
            assert isinstance(decoded, Decoded)
            broken += bool(run_module(decoded.source, "ModelNew", inputs).isnan().any())
    assert broken
