"""Test helper: what rendered Triton programs compute on ragged shapes, against float64: right ones are
right, the others wrong as they are meant.

A subprocess computes the operations of a test file under Triton's interpreter; on a GPU the same
programs are compiled and run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from torch_cudal1.training.ksl.ops import OPS

__all__ = ["Facts", "check_facts", "compute_facts", "list_ops", "needs_gpu"]

ROOT = Path(__file__).parents[2]
LIMIT = {"mm": 1e-3}  # float16 results; float32 elsewhere
ALWAYS_WRONG = {"fuse=swapped", "axis=swapped"}
LESS_EXACT = {"acc=f16"}
Facts: TypeAlias = dict[str, list[dict[str, Any]]]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def list_ops(*kinds: str) -> list[str]:
    """Names of the operations of these kinds."""
    return sorted(name for name, op in OPS.items() if op.kind in kinds)


def compute_facts(names: Sequence[str], *, interpreted: bool) -> Facts:
    """The facts of a sample of programs of each operation."""
    switch = {"TRITON_INTERPRET": "1"} if interpreted else {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | switch
    command = [sys.executable, "-m", "tests.training.triton_cases", *names]
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return dict(json.loads(process.stdout))


def check_facts(name: str, facts: Sequence[dict[str, Any]]) -> None:
    """Programs with their masks are exact, those that are meant to be wrong are not."""
    limit = LIMIT.get(OPS[name].kind, 2e-6)
    right = 0
    for fact in facts:
        words = set(fact["program"].split())
        is_complete = fact["form"] and fact["unwritten"] == 0
        if words & ALWAYS_WRONG:
            assert fact["error"] > 1e-2 or not is_complete, f"meant to be wrong: {fact}"
        elif "mask=on" in words and "carry=off" not in words and not words & LESS_EXACT:
            assert is_complete, f"dtype, shape or unwritten elements: {fact}"
            assert fact["error"] <= limit, f"error over {limit}: {fact}"
            right += 1
        elif "mask=on" in words and "carry=off" not in words and OPS[name].kind != "mm":
            assert is_complete
            assert limit < fact["error"] < 5e-2, f"half precision shows: {fact}"
    assert right, "no right program in the sample"
    assert any(fact["unwritten"] > 0 for fact in facts if "mask=off" in fact["program"]), (
        "without masks nothing was left out"
    )
