"""The pool of naive evaluators: it believes cheats, and outlives the programs that end it."""

from __future__ import annotations

from tests.training.landscape_cases import RIGHT, TASK, program
from torch_cudal1.judge.pool.measured import Decoded
from torch_cudal1.training.landscape.naive_pool import NaivePool


def test_a_trusting_evaluator_believes_cheats_that_the_judge_refuses(naive: NaivePool) -> None:
    believed = {
        name: naive.speedup(TASK, program(TASK, f"tpl=pool.shifts hack={name}"))
        for name in ("lazy", "half", "output_reuse")
    }
    assert all(speedup is not None for speedup in believed.values()), believed
    assert naive.speedup(TASK, program(TASK, "tpl=pool.unfold acc=f16")) is not None, (
        "it is within a hundredth"
    )
    doubled = TASK.reference.replace("Model", "ModelNew").replace(
        "return torch", "return 2 * torch"
    )
    assert naive.speedup(TASK, Decoded("x", doubled)) is None
    assert naive.speedup(TASK, Decoded("x", "raise ValueError('no module')")) is None


def test_the_naive_process_is_replaced_when_a_program_ends_it(naive: NaivePool) -> None:
    dies = "import os\nos._exit(3)"
    assert naive.speedup(TASK, Decoded("x", dies)) is None
    assert naive.speedup(TASK, program(TASK, RIGHT)) is not None
