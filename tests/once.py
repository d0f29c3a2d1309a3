"""Test helper: what takes a process of its own to find out, found out once for all of a run's
workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

__all__ = ["chosen_names", "run_interpreted"]

ROOT = Path(__file__).parents[1]


def chosen_names(request: pytest.FixtureRequest) -> list[str]:
    """What the parameter `name` is in those tests of the asking module that this run has chosen:
    `make test` leaves many out, and computing their facts would take most of its time.
    """
    names = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item, "callspec")
        and "name" in item.callspec.params
    }
    return sorted(names)


def run_interpreted(
    module: str, names: Sequence[str], paths: pytest.TempPathFactory
) -> dict[str, Any]:
    """The JSON object that `python -m module NAMES` prints under Triton's interpreter. Workers that
    ask at the same time wait for one.
    """
    folder = paths.getbasetemp()
    folder = (
        folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    )  # a worker's own is inside the run's
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    facts_path = folder / f"{module}.{digest}.json"
    with FileLock(f"{facts_path}.lock"):
        if not facts_path.exists():
            environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", module, *names]
            process = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert process.returncode == 0, process.stderr[-3000:]
            facts_path.write_text(process.stdout)
    return dict(json.loads(facts_path.read_text()))
