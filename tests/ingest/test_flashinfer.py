"""FlashInfer-Trace records: read, written, and refused by the name of their field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.ingest.flashinfer_records import (
    DEFINITION,
    EVALUATION,
    SOLUTION,
    TRACE,
    WORKLOAD,
    change_field,
)
from torch_cudal1.ingest.formats.flashinfer import (
    Definition,
    FlashInferTrace,
    Solution,
    TraceEvaluation,
    Workload,
)

RECORDS = {
    "definition": (Definition, DEFINITION),
    "solution": (Solution, SOLUTION),
    "workload": (Workload, WORKLOAD),
    "trace": (FlashInferTrace, TRACE),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_reads_back_as_it_was_written(name: str) -> None:
    kind, content = RECORDS[name]
    record = kind.from_json(content)
    assert record.to_json() == content
    assert kind.from_json(json.loads(json.dumps(record.to_json()))) == record


BAD: dict[str, tuple[type, dict[str, Any], str]] = {
    "no name": (Definition, change_field(DEFINITION, "name"), "no field 'name'"),
    "an axis of no kind": (
        Definition,
        change_field(DEFINITION, "axes", "m", value={"type": "ragged"}),
        "axes.m: type 'ragged'",
    ),
    "an axis below zero": (
        Definition,
        change_field(DEFINITION, "axes", "k", "value", value=-1),
        "axes.k: value: -1",
    ),
    "an undefined axis": (
        Definition,
        change_field(DEFINITION, "axes", "m"),
        "axes ['m'] are not defined",
    ),
    "an unknown dtype": (
        Definition,
        change_field(DEFINITION, "inputs", "x", "dtype", value="complex64"),
        "inputs.x: dtype 'complex64'",
    ),
    "a name on both sides": (
        Definition,
        change_field(DEFINITION, "outputs", value={"x": DEFINITION["inputs"]["x"]}),
        "['x'] are inputs and outputs",
    ),
    "a reference without run": (
        Definition,
        change_field(DEFINITION, "reference", value="x = 1"),
        "no function 'run'",
    ),
    "a reference that is no Python": (
        Definition,
        change_field(DEFINITION, "reference", value="def run(:"),
        "not valid Python",
    ),
    "a path out of the solution": (
        Solution,
        change_field(SOLUTION, "sources", value=[{"path": "../a.py", "content": "x"}]),
        "'../a.py'",
    ),
    "an absolute path": (
        Solution,
        change_field(SOLUTION, "sources", value=[{"path": "/a.py", "content": "x"}]),
        "'/a.py'",
    ),
    "an entry that is not there": (
        Solution,
        change_field(SOLUTION, "spec", "entry_point", value="b.py::go"),
        "'b.py::go'",
    ),
    "an entry of no form": (
        Solution,
        change_field(SOLUTION, "spec", "entry_point", value="main.py"),
        "'path::function'",
    ),
    "no sources": (Solution, change_field(SOLUTION, "sources", value=[]), "at least one file"),
    "two files of one path": (
        Solution,
        change_field(SOLUTION, "sources", value=SOLUTION["sources"] * 2),
        "same path",
    ),
    "an unknown language": (
        Solution,
        change_field(SOLUTION, "spec", "language", value="fortran"),
        "'fortran'",
    ),
    "a size that is no number": (
        Workload,
        change_field(WORKLOAD, "axes", "m", value="4"),
        "m: '4'",
    ),
    "an input of no kind": (
        Workload,
        change_field(WORKLOAD, "inputs", "x", value={"type": "pickle"}),
        "inputs.x: type 'pickle'",
    ),
    "a pass without a time": (
        TraceEvaluation,
        change_field(EVALUATION, "performance", value=None),
        "status PASSED",
    ),
    "a failure with a time": (
        TraceEvaluation,
        change_field(EVALUATION, "status", value="TIMEOUT"),
        "status TIMEOUT",
    ),
    "a status of no kind": (
        TraceEvaluation,
        change_field(EVALUATION, "status", value="FINE"),
        "'FINE'",
    ),
    "no object": (FlashInferTrace, ["a"], "expected a JSON object"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_is_not_as_it_should_be_names_the_field(name: str) -> None:
    kind, content, word = BAD[name]
    read: Callable[[Any], Any] = kind.from_json  # type: ignore[attr-defined]
    with pytest.raises(ValueError) as caught:
        read(content)
    assert word in str(caught.value)
