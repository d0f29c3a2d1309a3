"""Every model is a row: its times, and a failure with its reason."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.subject_tables.real_model_tables import tabulate_real_models


def test_a_failed_column_is_shown_with_its_reason_and_counts_as_one(tmp_path: Path) -> None:
    columns = {"eager": {"us": 2000.0}, "backend": {"failed": "out|of memory"}}
    against = {"best": "eager", "speedups": {"backend": {"best": 1.0, "torch.compile": 1.0}}}
    document = {
        "schema": 1,
        "created": "2026-11-28",
        "command": "python -m benchmarks.real_models",
        "environment": {
            "gpu": "",
            "cores": 2,
            "cpu": "a CPU",
            "torch": "2",
            "triton": "3",
            "python": "3",
        },
        "options": {"columns": list(columns)},
        "summary": {"models": 1, "backend": {"geomean_vs_best": 1.0, "worst": 1.0}},
        "rows": [
            {
                "model": "bert",
                "size": "small",
                "precision": "half",
                "columns": columns,
                "against": against,
            }
        ],
    }
    (tmp_path / "cpu-real-x.json").write_text(json.dumps(document))
    lines = tabulate_real_models(tmp_path)
    assert "| bert (small, half) | 2.000 | failed: out/of memory | 1.00x |" in lines
    assert lines[-2].endswith("a failure counting as 1.0: backend 1.00x.")
