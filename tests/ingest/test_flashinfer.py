"""FlashInfer-Trace records: read, refused by their field, written; folders as tasks; a stored
decision there and back again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entries import entry_for
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ingest.formats.flashinfer import (
    Definition,
    Evaluation,
    FlashInferTrace,
    Solution,
    Workload,
)
from torch_cudal1.ingest.formats.flashinfer_export import ExportedEntry, export_entry
from torch_cudal1.ingest.formats.registry import find_format, read_tasks
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Candidate, Region

RUN = "import torch\n\ndef run(x, w, scale):\n    return (x @ w) * scale\n"
DEFINITION: dict[str, Any] = {
    "name": "scaled_gemm",
    "op_type": "gemm",
    "tags": ["status:verified"],
    "axes": {"m": {"type": "var"}, "k": {"type": "const", "value": 8, "description": "inner"}},
    "inputs": {
        "x": {"shape": ["m", "k"], "dtype": "float32"},
        "w": {"shape": ["k", "k"], "dtype": "float32", "description": "weight"},
        "scale": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"y": {"shape": ["m", "k"], "dtype": "float32"}},
    "constraints": ["m > 0"],
    "reference": RUN,
}
SOLUTION: dict[str, Any] = {
    "name": "fused",
    "definition": "scaled_gemm",
    "author": "somebody",
    "spec": {
        "language": "python",
        "target_hardware": ["cpu"],
        "entry_point": "main.py::go",
        "dependencies": [],
        "destination_passing_style": True,
    },
    "sources": [
        {
            "path": "main.py",
            "content": "import torch\n\ndef go(x, w, scale, y):\n    y.copy_(x @ (w * scale))\n",
        }
    ],
}
WORKLOAD: dict[str, Any] = {
    "axes": {"m": 4},
    "inputs": {
        "x": {"type": "random"},
        "w": {"type": "random"},
        "scale": {"type": "scalar", "value": 0.5},
    },
    "uuid": "w1",
}
EVALUATION: dict[str, Any] = {
    "status": "PASSED",
    "environment": {"hardware": "NVIDIA_H100", "libs": {"torch": "2.8"}},
    "timestamp": "2026-01-01",
    "log": "",
    "correctness": {"max_relative_error": 0.0, "max_absolute_error": 0.0, "extra": None},
    "performance": {"latency_ms": 1.0, "reference_latency_ms": 2.0, "speedup_factor": 2.0},
}
TRACE: dict[str, Any] = {
    "definition": "scaled_gemm",
    "workload": WORKLOAD,
    "solution": "fused",
    "evaluation": EVALUATION,
}
RECORDS = {
    "definition": (Definition, DEFINITION),
    "solution": (Solution, SOLUTION),
    "workload": (Workload, WORKLOAD),
    "trace": (FlashInferTrace, TRACE),
}


def without(data: dict[str, Any], *path: str, value: Any = ...) -> dict[str, Any]:
    """A copy with a field removed, or set."""
    copied: dict[str, Any] = json.loads(json.dumps(data))
    inner = copied
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copied


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_reads_back_as_it_was_written(name: str) -> None:
    kind, data = RECORDS[name]
    record = kind.from_json(data)
    assert record.to_json() == data
    assert kind.from_json(json.loads(json.dumps(record.to_json()))) == record


BAD: dict[str, tuple[type, dict[str, Any], str]] = {
    "no name": (Definition, without(DEFINITION, "name"), "no field 'name'"),
    "an axis of no kind": (
        Definition,
        without(DEFINITION, "axes", "m", value={"type": "ragged"}),
        "axes.m: type 'ragged'",
    ),
    "an axis below zero": (
        Definition,
        without(DEFINITION, "axes", "k", "value", value=-1),
        "axes.k: value: -1",
    ),
    "an undefined axis": (
        Definition,
        without(DEFINITION, "axes", "m"),
        "axes ['m'] are not defined",
    ),
    "an unknown dtype": (
        Definition,
        without(DEFINITION, "inputs", "x", "dtype", value="complex64"),
        "inputs.x: dtype 'complex64'",
    ),
    "a name on both sides": (
        Definition,
        without(DEFINITION, "outputs", value={"x": DEFINITION["inputs"]["x"]}),
        "['x'] are inputs and outputs",
    ),
    "a reference without run": (
        Definition,
        without(DEFINITION, "reference", value="x = 1"),
        "no function 'run'",
    ),
    "a reference that is no Python": (
        Definition,
        without(DEFINITION, "reference", value="def run(:"),
        "not valid Python",
    ),
    "a path out of the solution": (
        Solution,
        without(SOLUTION, "sources", value=[{"path": "../a.py", "content": "x"}]),
        "'../a.py'",
    ),
    "an absolute path": (
        Solution,
        without(SOLUTION, "sources", value=[{"path": "/a.py", "content": "x"}]),
        "'/a.py'",
    ),
    "an entry that is not there": (
        Solution,
        without(SOLUTION, "spec", "entry_point", value="b.py::go"),
        "'b.py::go'",
    ),
    "an entry of no form": (
        Solution,
        without(SOLUTION, "spec", "entry_point", value="main.py"),
        "'path::function'",
    ),
    "no sources": (Solution, without(SOLUTION, "sources", value=[]), "at least one file"),
    "two files of one path": (
        Solution,
        without(SOLUTION, "sources", value=SOLUTION["sources"] * 2),
        "same path",
    ),
    "an unknown language": (
        Solution,
        without(SOLUTION, "spec", "language", value="fortran"),
        "'fortran'",
    ),
    "a size that is no number": (Workload, without(WORKLOAD, "axes", "m", value="4"), "m: '4'"),
    "an input of no kind": (
        Workload,
        without(WORKLOAD, "inputs", "x", value={"type": "pickle"}),
        "inputs.x: type 'pickle'",
    ),
    "a pass without a time": (
        Evaluation,
        without(EVALUATION, "performance", value=None),
        "status PASSED",
    ),
    "a failure with a time": (
        Evaluation,
        without(EVALUATION, "status", value="TIMEOUT"),
        "status TIMEOUT",
    ),
    "a status of no kind": (Evaluation, without(EVALUATION, "status", value="FINE"), "'FINE'"),
    "no object": (FlashInferTrace, ["a"], "expected a JSON object"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_is_not_as_it_should_be_names_the_field(name: str) -> None:
    kind, data, word = BAD[name]
    read: Callable[[Any], Any] = kind.from_json  # type: ignore[attr-defined]
    with pytest.raises(ValueError) as caught:
        read(data)
    assert word in str(caught.value)


def dataset(
    root: Path,
    *,
    definitions: Any = (DEFINITION,),
    solutions: Any = (SOLUTION,),
    traces: Any = (TRACE,),
) -> Path:
    for folder, records in (("definitions/gemm", definitions), ("solutions/gemm", solutions)):
        (root / folder).mkdir(parents=True)
        for number, record in enumerate(records):
            (root / folder / f"{number}.json").write_text(
                record if isinstance(record, str) else json.dumps(record)
            )
    (root / "workloads").mkdir()
    (root / "workloads" / "a.jsonl").write_text(
        "\n".join(r if isinstance(r, str) else json.dumps(r) for r in traces) + "\n"
    )
    return root


def called(text: str, entry: str, inputs: Any = None) -> Any:
    """A task's text as its user would run it."""
    space: dict[str, Any] = {}
    exec(text, space)
    given = space["get_inputs"]() if inputs is None else inputs
    return space[entry]()(*given), given


def test_a_solution_on_a_workload_is_a_pair_that_computes_the_same(tmp_path: Path) -> None:
    assert find_format(dataset(tmp_path)).name == "FlashInfer-Trace"
    (task,) = read_tasks(tmp_path)
    assert isinstance(task, PublishedTask)
    assert task.labels == {"definition": "scaled_gemm", "solution": "fused", "workload": "w1"}
    assert task.claims == {"evaluations": [EVALUATION]}
    expected, inputs = called(task.reference, "Model")
    assert [getattr(one, "shape", one) for one in inputs] == [(4, 8), (8, 8), 0.5]
    assert task.candidate is not None
    torch.testing.assert_close(called(task.candidate, "ModelNew", inputs)[0], expected)


def test_what_cannot_be_read_does_not_stop_the_rest(tmp_path: Path) -> None:
    other = without(SOLUTION, "definition", value="unheard_of")
    cuda = {**without(SOLUTION, "spec", "language", value="cuda"), "name": "c"}
    file_input = {"type": "safetensors", "path": "../../etc/passwd", "tensor_key": "x"}
    foreign = without(
        {**TRACE, "workload": without(WORKLOAD, "inputs", "x", value=file_input)},
        "workload",
        "uuid",
        value="w2",
    )
    root = dataset(tmp_path, solutions=(SOLUTION, other, "{", cuda), traces=(TRACE, "[1", foreign))
    found = list(read_tasks(root))
    reasons = " ".join(one.reason for one in found if isinstance(one, UnreadableTask))
    for word in ("'unheard_of'", "Expecting", "input 'x' lies in a tensor file"):
        assert word in reasons
    tasks = {task.name: task for task in found if isinstance(task, PublishedTask)}
    assert set(tasks) == {"fused on w1", "c on w1"}
    assert tasks["c on w1"].foreign.startswith("it is written in cuda")


def test_a_variable_axis_without_a_workload_is_said(tmp_path: Path) -> None:
    (found,) = read_tasks(dataset(tmp_path, traces=()))
    assert isinstance(found, UnreadableTask)
    assert "no workload" in found.reason


def region_of(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *inputs: torch.Tensor
) -> Region:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return forward(x, y)

    with torch.no_grad():
        (region,) = capture_regions(Module(), inputs)
    return region


def test_a_stored_decision_that_is_written_is_read_back_as_the_same_region_and_program(
    tmp_path: Path,
) -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 4)
    region = region_of(
        lambda x, y: torch.softmax((x @ y).clamp(min=float("-inf"), max=2.5), -1).to(torch.float16),
        x,
        y,
    )
    better = region_of(
        lambda x, y: torch.softmax(torch.mm(x, y).clamp_max(2.5), -1).to(torch.float16), x, y
    )
    entry = entry_for(
        region, Candidate(better.program, "inductor", "rewrites", ("planted",)), Settings()
    )
    made = export_entry(region, entry)
    assert isinstance(made, ExportedEntry)
    (task,) = read_tasks(
        dataset(
            tmp_path,
            definitions=(made.definition.to_json(),),
            solutions=(made.solution.to_json(),),
            traces=(made.trace.to_json(),),
        )
    )
    assert isinstance(task, PublishedTask)
    assert task.candidate is not None
    space: dict[str, Any] = {}
    exec(task.reference, space)
    given = space["get_inputs"]()
    theirs: dict[str, Any] = {}
    exec(task.candidate, theirs)
    with torch.no_grad():
        assert capture_regions(space["Model"](), tuple(given))[0].key == region.key
        assert capture_regions(theirs["ModelNew"](), tuple(given))[0].program == better.program
    (told,) = task.claims["evaluations"]
    assert told["performance"]["speedup_factor"] == 10.0
    assert told["correctness"]["max_absolute_error"] == "NaN"  # never measured, so never claimed


def test_what_the_format_cannot_say_is_said() -> None:
    spec = TensorSpec("float32", (2, 3), (1, 2), "cpu")
    step = Aten("aten.relu.default", (Value(0),), (), (1,))
    region = Region(Program((spec,), (step,), (1,)), ("input",))
    entry = entry_for(region, Candidate(region.program, "eager", "rewrites"), Settings())
    assert "strides [1, 2]" in refusal(region, entry)
    wide = Region(
        Program((replace(spec, dtype="complex64", strides=(3, 1)),), (step,), (1,)), ("input",)
    )
    assert "complex64" in refusal(
        wide, entry_for(wide, Candidate(wide.program, "eager", "rewrites"), Settings())
    )
    held = Program((), (replace(step, args=(Value(0),)),), (1,), ("c",), {"c": torch.ones(2)})
    fixed = Region(held, ())
    assert "constants" in refusal(
        fixed, entry_for(fixed, Candidate(held, "eager", "rewrites"), Settings())
    )
    assert "baseline" in refusal(
        region, replace(entry, choice=Candidate(region.program, "eager", "baseline"))
    )


def refusal(region: Region, entry: Any) -> str:
    found = export_entry(region, entry)
    assert isinstance(found, Refusal)
    return found.reason
