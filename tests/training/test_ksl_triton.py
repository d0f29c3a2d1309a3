"""Triton programs of the language, on ragged shapes against float64: right ones are right, the
others wrong as they are meant.

One subprocess computes all operations under Triton's interpreter; on a GPU the same programs are
compiled and run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_cudal1.training.ksl.ops import OPS

ROOT = Path(__file__).parents[2]
LIMIT = {"mm": 1e-3}  # float16 results; float32 elsewhere
ALWAYS_WRONG = {"fuse=swapped", "axis=swapped"}
LESS_EXACT = {"acc=f16"}
Facts = dict[str, list[dict[str, Any]]]


def computed(*, interpreted: bool) -> Facts:
    switch = {"TRITON_INTERPRET": "1"} if interpreted else {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | switch
    command = [sys.executable, "-m", "tests.training.triton_cases"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def facts() -> Facts:
    return computed(interpreted=True)


def judged(name: str, told: list[dict[str, Any]]) -> None:
    limit = LIMIT.get(OPS[name].kind, 2e-6)
    right = 0
    for fact in told:
        words = set(fact["program"].split())
        whole = fact["form"] and fact["unwritten"] == 0
        if words & ALWAYS_WRONG:
            assert fact["error"] > 1e-2 or not whole, f"meant to be wrong: {fact}"
        elif "mask=on" in words and "carry=off" not in words and not words & LESS_EXACT:
            assert whole, f"dtype, shape or unwritten elements: {fact}"
            assert fact["error"] <= limit, f"error over {limit}: {fact}"
            right += 1
        elif "mask=on" in words and "carry=off" not in words and OPS[name].kind != "mm":
            assert whole
            assert limit < fact["error"] < 5e-2, f"half precision shows: {fact}"
    assert right, "no right program in the sample"
    assert any(fact["unwritten"] > 0 for fact in told if "mask=off" in fact["program"]), (
        "without masks nothing was left out"
    )


@pytest.mark.parametrize("name", sorted(OPS))
def test_programs_compute_what_they_are_meant_to_under_the_interpreter(
    facts: Facts, name: str
) -> None:
    judged(name, facts[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_programs_compute_what_they_are_meant_to_on_a_gpu() -> None:
    for name, told in computed(interpreted=False).items():
        judged(name, told)
