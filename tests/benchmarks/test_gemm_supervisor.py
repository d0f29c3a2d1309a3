"""A measuring process that dies or hangs is replaced, and the journal names its candidate."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gemm_supervisor


def test_a_process_that_dies_or_hangs_is_replaced_and_its_candidate_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "served.py"
    script.write_text(
        "import sys, time, json, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "done = (folder / 'journal').read_text() if (folder / 'journal').exists() else ''\n"
        "if 'dies' not in done: print('start case / dies now', flush=True); sys.exit(3)\n"
        "if 'hangs' not in done: print('start case / sleeps now', flush=True); time.sleep(60)\n"
    )
    plain = gemm_supervisor.subprocess.Popen
    monkeypatch.setattr(
        gemm_supervisor.subprocess,
        "Popen",
        lambda command, **options: plain([sys.executable, str(script), str(tmp_path)], **options),
    )
    monkeypatch.setattr(gemm_supervisor, "_SILENT_S", 1.0)
    gemm_supervisor.supervise(tmp_path, 60.0)
    rows = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert [(row["name"], row["method"], row["failed"][:13]) for row in rows] == [
        ("case / dies now", "dies", "exit status 3"),
        ("case / sleeps now", "sleeps", "hangs"),
    ]
