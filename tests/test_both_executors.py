"""The plugin that runs every Program of a test run on both executors sees one that differs, and
says what it could not compare.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torch_cudal1.core import native

SCENE = """
import torch
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, LaunchArg, Program, TensorSpec, Value
import tests.both_executors as plugin

SPEC = TensorSpec("float32", (3, 4), (1, 3), "cuda")
TANH = Program((SPEC,), (Aten("aten.tanh.default", (Value(0),), (), (1,)),), (1, 0, None))

def test_that_agrees():
    outer = Program((SPEC,), (Call(Program((SPEC,), TANH.steps, (1,)), (0,), (1,)),), (1,))
    empty = Aten("aten.empty.memory_format", ((3,),), (("device", torch.device("cpu")), ("dtype", torch.float64)), (1,))
    assert outer.steps and Program((SPEC,), (empty,), (0,)).steps

def test_that_is_not_run():
    Program((SPEC,), (), (7,))
    Program((TensorSpec("float32", (1 << 30,), (1,), "cpu"),), (), (0,))
    args = (LaunchArg("ptr", Value(0)), LaunchArg("ptr", Value(1)))
    launch = Launch("k", "k", (1, 1, 1), 32, 0, args)
    Program((SPEC,), (Alloc(1, SPEC), launch), (1,), payloads={"k": torch.zeros(4, dtype=torch.uint8)})

def test_that_differs():
    Program((SPEC,), (Aten("aten.sin.default", (Value(0),), (), (1,)),), (1,))
    real = plugin.compile_program
    plugin.compile_program = lambda program, device: lambda inputs: [real(program, device)(inputs)[0] + 1e-6]

def test_that_raises_elsewhere():
    Program((SPEC,), (Aten("aten.view.default", (Value(0), (5, -1)), (), (1,)),), (1,))
    plugin.compile_program = lambda program, device: lambda inputs: [inputs[0]]
"""


@pytest.mark.skipif(native.extension() is None, reason=f"no C++ executor: {native.status()[1]}")
def test_a_program_on_which_they_differ_is_an_error_of_its_test(tmp_path: Path) -> None:
    scene = tmp_path / "test_scene.py"
    scene.write_text(SCENE)
    options = [
        "-p",
        "tests.both_executors",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-q",
        str(scene),
    ]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert "4 passed, 2 errors" in process.stdout
    assert "ERROR at teardown of test_that_differs" in process.stdout
    assert "ERROR at teardown of test_that_raises_elsewhere" in process.stdout
    for line in (
        "4 agree",
        "2 DIFFERENT",
        "1 not run: too large",
        "1 not run: refused by the check (ProgramError)",
    ):
        assert line in process.stdout, process.stdout
