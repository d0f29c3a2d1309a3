"""Test helper: a definition, a solution, a workload and a trace as FlashInfer-Trace files hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def change_field(record: dict[str, Any], *path: str, value: Any = ...) -> dict[str, Any]:
    """A copy with a field removed, or set."""
    copied: dict[str, Any] = json.loads(json.dumps(record))
    inner = copied
    for name in path[:-1]:
        inner = inner[name]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copied


def write_folder(
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
