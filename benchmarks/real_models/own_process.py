"""Runs one measurement in a process of its own, with caches of its own, and reads what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["run_measurement"]

_ROOT = Path(__file__).resolve().parents[2]


def run_measurement(
    module: str, arguments: Sequence[str], caches: Path, limit_s: float
) -> dict[str, Any]:
    """The JSON object on the last line that `python -m MODULE ARGUMENTS` prints, or {"failed": why}.
    What it caches goes below `caches`: Inductor's files, Triton's, and entries.
    """
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCH_CUDAL1_CACHE_DIR": str(caches / "entries"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", module, *arguments]
    try:
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not ready in {limit_s:g} s"}
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        return {"failed": (process.stderr.strip().splitlines() or ["without a word"])[-1][:300]}
    return dict(json.loads(lines[-1]))
