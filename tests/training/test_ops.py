"""Operations of the kernel-schedule language: a task names one at sizes that are plain numbers, and
its reference is a module that runs.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.ksl_cases import RAGGED
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.judge.worker.modules.source_modules import import_source
from torch_cudal1.training.ksl.ops import DIMS, OPS, make_task, render_reference, resolve_task


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_reference_runs_and_is_its_expression_of_its_arguments(name: str, tmp_path: Path) -> None:
    op = OPS[name]
    task = make_task(name, RAGGED[op.kind])
    reference = import_source(task.reference, tmp_path)
    inputs = reference.get_inputs()
    sizes = dict(zip(DIMS[op.kind], RAGGED[op.kind], strict=True))
    assert [tuple(tensor.shape) for tensor in inputs] == [
        tuple(sizes[size] for size in argument.sizes) for argument in op.arguments
    ]
    result = reference.Model()(*inputs)
    names = dict(zip(op.names, inputs, strict=True))
    assert torch.equal(result, eval(op.expression, {"torch": torch}, names))
    assert torch.isfinite(result).all()
    assert reference.get_init_inputs() == []


@pytest.mark.parametrize("name", sorted(OPS))
def test_pieces_of_an_operation_are_python_and_chains_have_the_same_number_of_steps(
    name: str,
) -> None:
    op = OPS[name]
    assert op.graph
    assert len(set(op.names)) == len(op.names)
    for step in (*op.torch_steps, *op.triton_steps):
        ast.parse(step)
    assert (op.kind == "chain") == bool(op.torch_steps) == bool(op.triton_steps)
    assert len(op.torch_steps) == len(op.triton_steps)


def test_labels_lie_below_the_number_of_columns_and_half_precision_is_drawn_as_such(
    tmp_path: Path,
) -> None:
    with_labels = [
        name for name, op in OPS.items() if any(a.draw == "labels" for a in op.arguments)
    ]
    assert with_labels
    for name in with_labels:
        text = render_reference(OPS[name], {"R": 500, "C": 3}, "float16")
        inputs = import_source(text, tmp_path).get_inputs()
        labels = [tensor for tensor in inputs if tensor.dtype == torch.int64]
        assert labels
        for tensor in labels:
            assert set(tensor.flatten().tolist()) == {0, 1, 2}
        assert all(tensor.dtype in (torch.int64, torch.float16) for tensor in inputs)


def test_a_task_is_named_by_operation_sizes_and_dtype_and_resolves_to_them() -> None:
    name = next(name for name, op in OPS.items() if op.kind == "mm")
    task = make_task(name, (4, 5, 6), "float16")
    assert (task.id, task.family, task.shape) == (f"{name}/4x5x6/f16", name, (4, 5, 6))
    assert resolve_task(task) == (OPS[name], {"M": 4, "N": 5, "K": 6})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"family": "no_such_op"}, "'no_such_op' is no operation of the language"),
        ({"shape": (4,)}, "expected sizes ('R', 'C')"),
        ({"shape": (4, 0)}, "above 0"),
        ({"shape": ()}, "above 0"),
        ({"dtype": "float64"}, "'float64'"),
    ],
)
def test_a_task_without_words_in_the_language_is_refused_with_the_reason(
    change: dict[str, object], reason: str
) -> None:
    task = TrainingTask("t", "", "silu_mul", (4, 5))
    assert not isinstance(resolve_task(task), Refusal)
    refusal = resolve_task(replace(task, **change))  # type: ignore[arg-type]
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
    with pytest.raises(ValueError, match=re.escape(reason)):
        make_task(
            *(getattr(replace(task, **change), field) for field in ("family", "shape", "dtype"))
        )  # type: ignore[arg-type]
