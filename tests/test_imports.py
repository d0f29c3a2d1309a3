"""The direction of imports, and what importing may not do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torch_cudal1"

# Each room may import itself and the rooms named here, without exceptions; the `__init__` and
# `__main__` of the package, all.
MAY_IMPORT = {
    "core": (),
    "ir": ("core",),
    "device": ("core", "ir"),
    "runtime": ("core", "ir", "device"),
    "kernels": ("core", "ir", "device"),
    "graph": ("core", "ir", "device", "runtime", "kernels"),
    "store": ("core", "ir", "device"),
    "judge": ("core", "ir", "device", "runtime", "kernels"),
    "search": ("core", "ir", "device", "runtime", "kernels", "graph", "store", "judge"),
    "ingest": ("core", "ir", "device", "runtime", "kernels", "graph", "store", "judge", "search"),
    "api": ("core", "ir", "device", "runtime", "kernels", "graph", "store", "judge", "search"),
    "cli": (
        "core",
        "ir",
        "device",
        "runtime",
        "kernels",
        "graph",
        "store",
        "judge",
        "search",
        "ingest",
        "api",
    ),
}
MAY_IMPORT["training"] = tuple(MAY_IMPORT)
CONFINE = (
    "torch_cudal1.judge.sandbox.confine"  # run by a launcher that must start fast and without torch
)


def find_imported_modules(path: Path) -> set[str]:
    """Dotted names of what a file imports from this package, anywhere in it, deferred imports
    included.
    """
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "torch_cudal1"
        ):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {
                alias.name for alias in node.names if alias.name.startswith("torch_cudal1.")
            }
    return imported


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def test_every_folder_of_the_package_is_a_room():
    assert {path.relative_to(PACKAGE).parts[0] for path in FILES} == set(MAY_IMPORT)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_imports_only_from_the_rooms_below_it(path):
    room = path.relative_to(PACKAGE).parts[0]
    wrong = {
        name
        for name in find_imported_modules(path)
        if name.split(".")[1] not in (room, *MAY_IMPORT[room])
    }
    assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}"


@pytest.mark.parametrize(
    "path", [*PACKAGE.glob("judge/sandbox/confine/*.py")], ids=lambda path: path.name
)
def test_the_launcher_imports_nothing_but_itself(path):
    assert all(name.startswith(CONFINE) for name in find_imported_modules(path))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_every_room_says_what_it_owns_and_what_it_may_import(room):
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
    assert docstring
    assert "mport" in docstring


def test_only_settings_reads_the_environment():
    for path in PACKAGE.rglob("*.py"):
        names = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        assert path.name == "settings.py" or not names & {"environ", "getenv"}, (
            f"{path} reads the environment"
        )


def test_importing_the_package_changes_nothing_and_loads_nothing_heavy():
    code = """
import os, sys, logging
before = dict(os.environ)
import torch_cudal1, cudal1
assert dict(os.environ) == before
assert not logging.getLogger("torch_cudal1").handlers
heavy = [name for name in ("torch", "triton", "torch._inductor", "matplotlib", "huggingface_hub") if name in sys.modules]
assert not heavy, heavy
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr


def test_the_backend_module_loads_without_inductor_or_triton():
    code = """
import sys
import torch_cudal1.api.backend
heavy = [name for name in ("triton", "torch._inductor.compile_fx") if name in sys.modules]
assert not heavy, heavy
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr


def test_a_warm_look_up_needs_neither_judge_nor_kernels():
    code = """
import sys
import torch
import torch_cudal1.api.backend, torch_cudal1.api.ranks.consensus
from torch_cudal1.store.context import make_context
from torch_cudal1.core.settings import Settings
make_context(torch.device("cpu"), Settings()).find_decision_record("ab" * 32)
heavy = ("torch_cudal1.judge", "torch_cudal1.kernels", "huggingface_hub", "cryptography")
loaded = [name for name in sys.modules if name.startswith(heavy)]
assert not loaded, loaded
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr


def test_binding_what_is_decided_loads_no_search():
    code = """
import sys
import torch_cudal1.api.accelerate
searching = ("torch_cudal1.search.strategy", "torch_cudal1.kernels", "torch_cudal1.graph.rewrite", "torch_cudal1.graph.propose",
    "torch_cudal1.judge.evaluate.evaluator", "torch_cudal1.judge.checks")
loaded = [name for name in sys.modules if name.startswith(searching)]
assert not loaded, loaded
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
