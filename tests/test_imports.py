"""The direction of imports, and what importing may not do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torch_cudal1"

# Each layer may import itself and the layers it names. Folders are one unit; single files are units by their own name.
GROUND = (
    "collector",
    "errors",
    "records",
    "settings",
    "observe",
    "native",
    "guard",
    "switch",
    "machine",
    "explanation",
    "kernelbench",
    "version",
    "stand_in",
    "program",
)
FLOW = (*GROUND, "kernels", "graph", "source", "judge", "admission", "pipeline")
MAY_IMPORT = {
    "version": (),
    "collector": (),
    "errors": (),
    "settings": ("errors",),
    "observe": (),
    "switch": (),
    "explanation": (),
    "kernelbench": (),
    "native": ("errors", "version"),
    "watched": (),
    "watch": ("watched",),
    "guard": ("errors", "native", "watch", "watched"),
    "double_backward": ("flat", "guard"),
    "flat": ("errors",),
    "fast": ("native", "switch"),
    "program": ("collector", "errors", "native", "observe", "records", "stand_in"),
    "records": ("program",),
    "special": ("program",),
    "machine": ("records", "settings", "version"),
    "kernels": GROUND,
    "graph": (*GROUND, "kernels", "watch", "watched"),
    "source": (*GROUND, "kernels"),
    "confine": (),  # run by a launcher that must start fast and without torch
    "judge": (*GROUND, "kernels", "confine"),
    "place": (*GROUND, "source"),
    "admission": (*GROUND, "source", "judge", "place"),
    "island_race": (*GROUND, "kernels", "judge", "source", "place"),
    "built": (*GROUND, "kernels", "source", "judge", "place"),
    "learned": (*GROUND, "kernels", "source"),
    "generations": (*GROUND, "kernels", "learned"),
    "island_kernels": (
        *GROUND,
        "kernels",
        "graph",
        "source",
        "judge",
        "admission",
        "place",
        "built",
        "learned",
        "generations",
        "island_race",
    ),
    "roof": (*GROUND, "graph", "judge"),
    "search": (*GROUND, "kernels", "graph", "source", "judge", "place", "island_kernels"),
    "pipeline": (*FLOW, "place", "roof", "search"),
    "reporting": (*FLOW, "place"),
    "shadow": (*FLOW, "place"),
    "rank_line": (),
    "ranks": (*FLOW, "place", "rank_line"),
    "forms": (),
    "recording": (*FLOW, "forms"),
    "recorded": (*FLOW, "forms", "recording", "targets"),
    "stand_in": ("settings",),
    "compiled_ahead": (*GROUND, "source", "place"),
    "binding": (
        *(*FLOW, "place", "compiled_ahead", "double_backward", "fast", "flat", "gate", "pieces", "shadow", "ranks", "trial_step"),
        *("watch", "watched"),
    ),
    "pieces": (*FLOW, "backend", "double_backward", "trial_step", "watched"),
    "gate": (*GROUND, "graph", "judge", "place", "trial_step"),
    "trial_step": (),
    "in_place": (*GROUND, "graph", "judge", "flat", "trial_step"),
    "recurrent_frames": ("program",),
    "backend": (*FLOW, "place", "shadow", "ranks", "recording", "recurrent_frames", "in_place", "trial_step"),
    "module": (*FLOW, "place", "binding", "pieces", "fast", "recording", "reporting"),
    "planning": (*FLOW, "place", "binding"),
    "published": (*FLOW, "flat", "place", "binding"),
    "targets": GROUND,
    "warm_up": (*FLOW, "place", "binding", "module", "recorded", "targets", "reporting", "trial_step"),
    "hardware": GROUND,
    "fleet": (*GROUND, "source", "recorded", "targets", "warm_up"),
    "view": GROUND,
    "training": (*FLOW, "confine", "place", "targets", "view", "published", "learned"),
}
TOP = ("__init__", "__main__", "commands")  # may import everything


def unit_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    """Units of this package that a file imports anywhere in it, deferred imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch_cudal1":
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("torch_cudal1.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_imports_only_from_the_layers_below_it(path):
    unit = unit_of(path)
    if unit in TOP:
        return
    assert unit in MAY_IMPORT, f"{path.name}: give it a place in MAY_IMPORT"
    wrong = imported_units(path) - set(MAY_IMPORT[unit]) - {unit}
    assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}"


def test_only_settings_reads_the_environment():
    for path in PACKAGE.rglob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert path.name == "settings.py" or not names & {"environ", "getenv"}, f"{path} reads the environment"


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_backend_module_loads_without_inductor_or_triton():
    code = """
import sys
import torch_cudal1.backend
heavy = [name for name in ("triton", "torch._inductor.compile_fx") if name in sys.modules]
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_warm_look_up_needs_neither_judge_nor_kernels():
    code = """
import sys
import torch
import torch_cudal1.backend, torch_cudal1.ranks
from torch_cudal1.place import place_for
from torch_cudal1.settings import Settings
place_for(torch.device("cpu"), Settings()).alias("ab" * 32)
heavy = ("torch_cudal1.judge", "torch_cudal1.kernels", "huggingface_hub", "cryptography")
loaded = [name for name in sys.modules if name.startswith(heavy)]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_binding_what_is_decided_loads_no_search():
    code = """
import sys
import torch_cudal1.module
searching = ("torch_cudal1.search", "torch_cudal1.kernels", "torch_cudal1.graph.rewrite", "torch_cudal1.graph.propose",
    "torch_cudal1.judge.court", "torch_cudal1.judge.detectors")
loaded = [name for name in sys.modules if name.startswith(searching)]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
