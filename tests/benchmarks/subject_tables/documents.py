"""Results files of tests: a machine, a command, rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CPU_MACHINE = {
    "gpu": "",
    "cpu": "a CPU",
    "cores": 4,
    "torch": "2.11",
    "triton": "3.6",
    "python": "3.12",
}


def make_document(rows: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """A results file as `benchmarks.report.load` returns it."""
    head = {"schema": 1, "kind": "test", "command": "python -m it", "environment": CPU_MACHINE}
    return {**head, "rows": list(rows), **more}


def write_document(path: Path, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """The same as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(make_document(rows, **more)))
