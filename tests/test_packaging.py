"""What a wheel holds, and a process whose Triton is missing: slower, never broken, and the doctor
says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch_cudal1"
WITHOUT_TRITON = """
import sys
from importlib import metadata

class Missing:  # as where it is not installed: nothing to import, no version on record
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
known = metadata.version

def version(name):
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return known(name)

metadata.version = version
import torch
import cudal1
from torch_cudal1.__main__ import main

module, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), torch.randn(2, 8)
with torch.no_grad():
    expected = module(x)
    assert torch.equal(cudal1.accelerate(module, (x,))(x), expected)
assert "triton" not in sys.modules
sys.exit(main(["doctor", "--json"]))
"""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_of_the_package_goes_into_a_wheel() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["torch_cudal1"]
    package_files = [
        path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    data_files = [
        path.relative_to(PACKAGE).as_posix()
        for path in package_files
        if path.suffix not in (".py", ".so")
    ]
    assert data_files, "no data files were found, so nothing was looked at"
    assert [
        name for name in data_files if not any(fnmatch(name, pattern) for pattern in patterns)
    ] == []
    folders = {path.parent for path in package_files if path.suffix == ".py"}
    assert [folder.name for folder in folders if not (folder / "__init__.py").exists()] == []


def test_a_wheel_holds_the_entries_and_looks_for_them_there(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(
        command,
        env={**os.environ, "CUDAL1_NO_EXTENSION": "1"},
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    built = {
        path.relative_to(tmp_path / "torch_cudal1")
        for path in (tmp_path / "torch_cudal1" / "kernels_cache").rglob("*")
    }
    assert built == {path.relative_to(ROOT) for path in (ROOT / "kernels_cache").rglob("*")}
    where = "import torch_cudal1.store.trust.trust_policy as t; print(t.SHIPPED)"
    printed = subprocess.run(
        [sys.executable, "-P", "-c", where],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout.strip()
    assert printed == str(tmp_path / "torch_cudal1" / "kernels_cache")


def test_the_console_script_and_the_backend_lead_somewhere() -> None:
    from importlib import import_module

    metadata = project()["project"]
    for place in (
        metadata["scripts"]["cudal1"],
        metadata["entry-points"]["torch_dynamo_backends"]["cudal1"],
    ):
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(module), name))


def test_without_triton_the_answer_is_right_and_the_doctor_tells() -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )
    assert process.stdout.startswith("{"), process.stderr[-2000:]
    report = json.loads(process.stdout)
    (finding,) = [finding for finding in report["findings"] if finding["name"] == "Triton"]
    assert not finding["ok"]
    assert finding["what"] == "not installed"
