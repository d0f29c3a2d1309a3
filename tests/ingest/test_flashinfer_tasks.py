"""A folder of FlashInfer-Trace records as tasks: each solution on each workload, and what cannot be
read by its reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.ingest.flashinfer_records import (
    EVALUATION,
    SOLUTION,
    TRACE,
    WORKLOAD,
    change_field,
    write_folder,
)
from torch_cudal1.ingest.formats.registry import find_format, read_tasks
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask


def call_module(text: str, entry: str, inputs: Any = None) -> Any:
    """A task's text as its user would run it."""
    names: dict[str, Any] = {}
    exec(text, names)
    arguments = names["get_inputs"]() if inputs is None else inputs
    return names[entry]()(*arguments), arguments


def test_a_solution_on_a_workload_is_a_pair_that_computes_the_same(tmp_path: Path) -> None:
    assert find_format(write_folder(tmp_path)).name == "FlashInfer-Trace"
    (task,) = read_tasks(tmp_path)
    assert isinstance(task, PublishedTask)
    assert task.labels == {"definition": "scaled_gemm", "solution": "fused", "workload": "w1"}
    assert task.claims == {"evaluations": [EVALUATION]}
    expected, inputs = call_module(task.reference, "Model")
    assert [getattr(argument, "shape", argument) for argument in inputs] == [(4, 8), (8, 8), 0.5]
    assert task.candidate is not None
    torch.testing.assert_close(call_module(task.candidate, "ModelNew", inputs)[0], expected)


def test_what_cannot_be_read_does_not_stop_the_rest(tmp_path: Path) -> None:
    without_definition = change_field(SOLUTION, "definition", value="unheard_of")
    cuda = {**change_field(SOLUTION, "spec", "language", value="cuda"), "name": "c"}
    file_input = {"type": "safetensors", "path": "../../etc/passwd", "tensor_key": "x"}
    foreign = change_field(
        {**TRACE, "workload": change_field(WORKLOAD, "inputs", "x", value=file_input)},
        "workload",
        "uuid",
        value="w2",
    )
    root = write_folder(
        tmp_path, solutions=(SOLUTION, without_definition, "{", cuda), traces=(TRACE, "[1", foreign)
    )
    answers = list(read_tasks(root))
    reasons = " ".join(answer.reason for answer in answers if isinstance(answer, UnreadableTask))
    for word in ("'unheard_of'", "Expecting", "input 'x' lies in a tensor file"):
        assert word in reasons
    tasks = {task.name: task for task in answers if isinstance(task, PublishedTask)}
    assert set(tasks) == {"fused on w1", "c on w1"}
    assert tasks["c on w1"].foreign.startswith("it is written in cuda")


def test_a_variable_axis_without_a_workload_is_said(tmp_path: Path) -> None:
    (unreadable,) = read_tasks(write_folder(tmp_path, traces=()))
    assert isinstance(unreadable, UnreadableTask)
    assert "no workload" in unreadable.reason
