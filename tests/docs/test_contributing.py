"""The worked examples of CONTRIBUTING.md do what they say: each is put into its registry and used."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.adversarial.fork_server import fork_children
from tests.docs.test_examples import ROOT, blocks
from torch_cudal1.core.settings import Settings
from torch_cudal1.device import specs
from torch_cudal1.device.specs import GpuSpec, max_shared_bytes
from torch_cudal1.ingest.formats import registry as formats
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks import registry as checks
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import PROFILES
from torch_cudal1.judge.reference.source_reference import SourceCandidate, read_reference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

PAGE = ROOT / "CONTRIBUTING.md"
REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs(): return [torch.randn(64, 32)]
def get_init_inputs(): return []
"""


def find_block(file: str) -> str:
    """The example that is headed by a comment with the file's path."""
    (block,) = (b for b in blocks(PAGE, "python") if b.startswith(f"# {file}"))
    return block


def load_example(file: str) -> ModuleType:
    """The example as the module that it would be."""
    module = ModuleType(file.removesuffix(".py").replace("/", "."))
    # A dataclass looks its module up by name.
    sys.modules[module.__name__] = module
    try:
        exec(compile(find_block(file), file, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module


def test_the_template_is_right_for_every_proposal(tmp_path: Path) -> None:
    """In a process of its own: Triton's interpreter is chosen when Triton is imported."""
    script = """
import json
import torch
from tests.docs.test_contributing import load_example
from tests.kernels import cases, compare
from torch_cudal1.kernels import registry
template = load_example("torch_cudal1/kernels/templates/distances.py").TEMPLATE
registry.TEMPLATES = (template, *registry.TEMPLATES)
assert registry.list_anchors("row") >= {"aten._cdist_forward.default"}
generator = torch.Generator().manual_seed(3)
inputs = tuple(torch.randn(rows, 40, generator=generator) for rows in (70, 33))
kernel = lambda x, y: torch.exp(-torch.cdist(x, y, p=1.0))
compare.all_cases = lambda: {"a kernel matrix": (kernel, inputs)}
compare.main(["a kernel matrix"])
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    facts = json.loads(process.stdout)["a kernel matrix"]
    assert len({json.dumps(fact["config"]) for fact in facts}) > 1
    for fact in facts:
        assert fact["spec"]
        assert fact["error"] <= max(16.0, 2.0 * fact["eager"]), fact


def evaluate_source(text: str, check: object) -> list[CheckResult]:
    """The results of `numerics` and a check for a `ModelNew`."""
    device = torch.device("cpu")
    limits = make_limits(Settings(), device)
    with fork_children(), Child(limits, Contract()) as oracle:
        reference, inputs = read_reference(oracle, REFERENCE, device)
        with Child(limits, Contract()) as child:
            trial = Trial(reference, SourceCandidate(text), Contract(), device, child, inputs)
            trial.load("candidate", trial.candidate)
            return list(validate(trial, PROFILES["fast"], checks=(NUMERICS, check)).checks)


@pytest.mark.parametrize(("side", "failures"), [("CHEAT", ["ascending_inputs"]), ("HONEST", [])])
def test_the_check_refuses_its_attack_and_passes_the_honest_twin(
    side: str, failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = load_example("torch_cudal1/judge/checks/ascending_inputs.py").ASCENDING_INPUTS
    attack = load_example("tests/adversarial/semantics/special_values_ascending.py")
    results = evaluate_source(getattr(attack, side), check)
    assert [result.name for result in results if not result.passed] == failures, results
    assert any(result.name == "ascending_inputs" for result in results)
    monkeypatch.setattr(checks, "PROTOCOL", (*checks.PROTOCOL, check))
    assert check in checks.select_checks(PROFILES["fast"])


def test_a_row_of_the_table_is_all_that_a_new_gpu_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = (
        node
        for node in ast.parse(find_block("torch_cudal1/device/specs.py")).body
        if isinstance(node, ast.Expr)
    )
    rows = eval(compile(ast.Expression(row.value), "row", "eval"), {"GpuSpec": GpuSpec})
    (sm,) = rows
    assert sm not in specs.GPU_SPECS, "the example shows a GPU that the table has by now"
    monkeypatch.setattr(specs, "GPU_SPECS", {**specs.GPU_SPECS, **rows})
    assert max_shared_bytes(sm) == rows[sm].block_shared_bytes


def test_the_format_reads_its_lines_and_tells_the_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kernelbook-small.jsonl"
    row = {"python_code": REFERENCE, "triton_code": "class ModelNew: pass"}
    file.write_text(f"{json.dumps(row)}\n{{\n")
    book = load_example("torch_cudal1/ingest/formats/kernelbook.py").KernelBook()
    monkeypatch.setattr(formats, "FORMATS", (book, *formats.FORMATS))
    assert formats.find_format(file) is book
    task, damaged = formats.read_tasks(file)
    assert isinstance(task, PublishedTask)
    assert (task.reference, task.candidate) == (REFERENCE, row["triton_code"])
    assert isinstance(damaged, UnreadableTask)
    assert damaged.where == f"{file}:2"


def test_files_that_the_page_names_exist() -> None:
    page = PAGE.read_text()
    named = {
        word.strip("`.,:;()")
        for word in page.split()
        if word.startswith(("`torch_cudal1/", "`tests/"))
    }
    examples = {"torch_cudal1/graph/lower.py"}
    assert examples <= named
    # `tests/...` stands for any file.
    missing = [name for name in named if "..." not in name and not (ROOT / name).exists()]
    assert not missing
