"""Files of others are recognised by what they compute, or listed as unsupported with the reason;
none is run.
"""

from __future__ import annotations

import pytest

from torch_cudal1.judge.pool.measured import Decoded, TrainingTask
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.recognise import recognise, recognise_all
from torch_cudal1.training.tasks import tasks_for

FILE = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self{init}):
        super().__init__()

    def forward(self, {names}):
        \"\"\"What it does.\"\"\"
        return {result}

M = 16 * 4
N = 2 ** 7

def get_inputs():
    {inputs}
    return [{given}]

def get_init_inputs():
    return [{made}]
"""


def task(
    result: str, names: str = "A, B", given: str = "A, B", inputs: str = "", **more: str
) -> TrainingTask:
    inputs = inputs or "A = torch.rand(M)\n    B = torch.randn(M, N)"
    text = FILE.format(
        result=result,
        names=names,
        given=given,
        inputs=inputs,
        init=more.get("init", ""),
        made=more.get("made", ""),
    )
    return TrainingTask("level1/12", text)


@pytest.mark.parametrize(
    ("made", "family", "shape"),
    [
        (task("torch.diag(A) @ B"), "diag_left", (64, 128)),
        (task("torch.matmul(torch.diag(A), B)"), "diag_left", (64, 128)),
        (
            task("torch.softmax(x, dim=1)", "x", "torch.randn((M, 3000))", "pass"),
            "softmax",
            (64, 3000),
        ),
        (
            task("torch.mm(A, B)", inputs="A = torch.rand(M, 32)\n    B = torch.rand(32, N)"),
            "matmul",
            (64, 128, 32),
        ),
        (task("torch.cumsum(x, dim=-1)", "x", "torch.rand(5, 7)"), "cumsum", (5, 7)),
        (task("F.silu(a) * b", "a, b", "torch.rand(5, 7), torch.rand(5, 7)"), "silu_mul", (5, 7)),
    ],
)
def test_a_known_operation_is_recognised_in_any_spelling(
    made: TrainingTask, family: str, shape: tuple[int, ...]
) -> None:
    found = recognise(made)
    assert isinstance(found, TrainingTask), found
    assert (found.id, found.family, found.shape, found.reference) == (
        "level1/12",
        family,
        shape,
        made.reference,
    )
    codec = KslCodec("cpu")
    assert isinstance(codec.decode(found, codec.programs(found)[0].text), Decoded)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (task("torch.softmax(x, dim=0)", "x", "torch.rand(5, 7)"), "no operation"),
        (task("torch.linalg.inv(x)", "x", "torch.rand(7, 7)"), "no operation"),
        (task("torch.diag(A) @ B", init=", size", made="4"), "constructor"),
        (
            task("torch.diag(A) @ B", inputs="A = torch.rand(M)\n    B = torch.rand(*SIZES)"),
            "no constant sizes",
        ),
        (
            task("torch.diag(A) @ B", inputs="A = torch.rand(M)\n    B = torch.rand(N, M)"),
            "with inputs of shapes",
        ),
        (task("torch.diag(A) @ B", given="A"), "with 1 inputs"),
        (TrainingTask("x", "class Model(:"), "does not parse"),
        (TrainingTask("x", "raise SystemExit"), "no forward"),
    ],
)
def test_anything_else_is_unsupported_with_the_reason(made: TrainingTask, reason: str) -> None:
    found = recognise(made)
    assert isinstance(found, str)
    assert reason in found


def test_every_task_of_ours_in_float32_is_recognised_as_itself() -> None:
    ours = [
        one for one in tasks_for("cuda") if one.dtype == "float32" and one.family != "cross_entropy"
    ]
    found = recognise_all([TrainingTask(one.id, one.reference) for one in ours])
    assert not found.unsupported
    assert [(one.family, one.shape) for one in found.tasks] == [
        (one.family, one.shape) for one in ours
    ]
