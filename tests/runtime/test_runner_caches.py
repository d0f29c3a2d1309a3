"""Inductor's own caches serve the next process what this one compiled, and never one Program the
result of another.

The Programs below differ in one constant, or in the Program inside them: what a key that looks at
operators alone would confuse. Every step is a matrix product or an opaque node, so that no C++
compiler is waited for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from torch_cudal1.ir.program import Aten, Call, Program, TensorSpec, Value

SPEC = TensorSpec("float32", (6, 6), (6, 1), "cpu")
INNER = {
    name: Program((SPEC,), (Aten(f"aten.{name}.default", (Value(0),), (), (1,)),), (1,))
    for name in ("tanh", "neg")
}


def program(constant: float, inner: str) -> Program:
    """x @ (a matrix of `constant`), through `inner`."""
    steps = (
        Aten("aten.mm.default", (Value(0), Value(1)), (), (2,)),
        Call(INNER[inner], (2,), (3,)),
    )
    return Program(
        (SPEC,), steps, (3,), constants=("c",), payloads={"c": torch.full((6, 6), constant)}
    )


SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
from tests.runtime.test_runner_caches import program
from torch_cudal1.runtime.runner import build_runner

x, answers = torch.linspace(-1, 1, 36).reshape(6, 6), []
with torch.no_grad():
    for pair in sys.argv[1:]:
        constant, inner = float(pair.split()[0]), pair.split()[1]
        (result,) = build_runner(program(constant, inner), "inductor", torch.device("cpu"))([x])
        right = {"tanh": torch.tanh, "neg": torch.neg}[inner](x @ torch.full((6, 6), constant))
        answers.append({"right": torch.allclose(result, right), "hits": counters["inductor"]["fxgraph_cache_hit"]})
assert not counters["inductor"]["fxgraph_cache_bypass"]
print(json.dumps(answers))
"""


def run_in_new_process(folder: Path, *pairs: str) -> list[dict[str, object]]:
    """What a fresh process with the Inductor caches in `folder` says of these Programs, one after
    the other.
    """
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", SCRIPT, *pairs]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    answer: list[dict[str, object]] = json.loads(process.stdout.splitlines()[-1])
    return answer


def test_the_next_process_is_served_from_the_cache_and_another_program_never_by_the_same_file(
    tmp_path: Path,
) -> None:
    assert run_in_new_process(tmp_path, "0.5 tanh") == [{"right": True, "hits": 0}]
    served, *answers = run_in_new_process(tmp_path, "0.5 tanh", "0.25 tanh", "0.5 neg")
    assert served == {"right": True, "hits": 1}
    assert [other["right"] for other in answers] == [True, True]
