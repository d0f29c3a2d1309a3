"""What runs in a candidate's process imports no reference, no tolerance and no verdict.

The rule is tested twice: by the import statements of every file that the worker reaches, and by the
modules that real child processes have loaded after they served requests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torch_cudal1
from tests.judge.programs import linear_relu
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox.child import Child, make_limits
from torch_cudal1.judge.sandbox.confine import landlock, seccomp
from torch_cudal1.judge.sandbox.fork_server import ForkedProcess, ForkServer
from torch_cudal1.judge.wire.call_spec import unpack_arguments
from torch_cudal1.judge.wire.channel import load_tensors
from torch_cudal1.judge.wire.transport import write_payloads

CPU = torch.device("cpu")
LIMITS = replace(make_limits(Settings(), CPU), threads=1)
PROGRAM = linear_relu().program
ROOT = Path(torch_cudal1.__file__).parent
JUDGE = "torch_cudal1.judge"
ALLOWED = (  # of the judge, for a file of `judge.worker`; `confine` is the launcher's side of it
    "wire",
    "worker",
    "sandbox.confine",
    "benchmark.clock",
    "benchmark.timing",
    "benchmark.rotating_inputs",
)
FORBIDDEN = ("evaluate", "checks", "reference")
WORKERS = (  # modules that serve in a child
    "torch_cudal1.judge.worker.session",
    "torch_cudal1.ingest.published.source_worker",
    "torch_cudal1.training.naive_worker",
    "torch_cudal1.training.landscape.landscape_worker",
)
# a reference whose constructor arguments are the names of the modules of the judge in its process
SPY = """
import sys, torch
class Model(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
    def forward(self, x):
        return x
def get_inputs():
    return [torch.ones(1)]
def get_init_inputs():
    return [[name for name in sys.modules if name.startswith("torch_cudal1.judge.")]]
"""


def _is_within(module: str, parts: tuple[str, ...]) -> bool:
    names = [f"{JUDGE}.{part}" for part in parts]
    return any(module == name or module.startswith(f"{name}.") for name in names)


def _find_file(module: str) -> Path | None:
    """The file of a module of the package; None for a name that is no module."""
    path = ROOT.parent.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


def _list_imports(path: Path, *, runtime: bool = False) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it, or only what runs (`runtime`: not
    below `if TYPE_CHECKING`).
    """
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if runtime and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(inner for part in node.body for inner in ast.walk(part))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _find_file(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                if name.startswith("torch_cudal1") and _find_file(name):
                    yield name
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: a relative import, which this test does not follow")


@pytest.mark.parametrize("path", sorted((ROOT / "judge/worker").glob("*.py")), ids=lambda p: p.stem)
def test_a_file_of_the_worker_imports_what_it_may(path: Path) -> None:
    of_judge = {name for name in _list_imports(path) if name.startswith(f"{JUDGE}.")}
    packages = {f"{JUDGE}.benchmark", f"{JUDGE}.sandbox"}  # `from judge.benchmark import timing`
    assert [name for name in of_judge - packages if not _is_within(name, ALLOWED)] == []


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("wire", FORBIDDEN),
        ("sandbox", FORBIDDEN),
        # It compares what timed calls answered with a reference's outputs, and says no verdict.
        ("benchmark", ("evaluate", "checks")),
    ],
)
def test_a_folder_below_the_verdict_does_not_import_it(
    folder: str, forbidden: tuple[str, ...]
) -> None:
    files = sorted((ROOT / "judge" / folder).rglob("*.py"))
    assert files
    imported = {(path.name, name) for path in files for name in _list_imports(path)}
    assert [pair for pair in imported if _is_within(pair[1], forbidden)] == []


@pytest.mark.parametrize("worker", WORKERS[:1])
def test_what_the_worker_reaches_is_not_the_judges(worker: str) -> None:
    """Through any number of imports, deferred ones included, as far as the rooms below `judge`."""
    importers, queue = {worker: ""}, [worker]
    while queue:
        module = queue.pop()
        path = _find_file(module)
        assert path is not None
        for name in _list_imports(path, runtime=True):
            if name not in importers and name.startswith(f"{JUDGE}."):
                importers[name] = module
                queue.append(name)
    assert len(importers) > 20
    reached = [(name, by) for name, by in importers.items() if _is_within(name, FORBIDDEN)]
    assert reached == []


def _serve_requests(child: Child) -> None:
    """One request of each kind, so that what is imported late is there."""
    inputs = [torch.randn(spec.shape) for spec in PROGRAM.inputs]
    payloads = write_payloads(PROGRAM, child.reserve_file())
    program = {"program": PROGRAM.to_json(), "payloads": payloads}
    child.call("load", slot="candidate", schedule="eager", static=[], **program)
    child.put("first", inputs)
    child.put("second", inputs)
    for verb, fields in (
        ("run", {"hold": True}),
        ("poisoned", {"byte": 7, "deterministic": False}),
        ("banded", {"seed": 5, "positions": [0], "holes": []}),
        ("vast", {"grown": [], "seed": 1, "pieces": [0.0]}),
        ("many", {"calls": 2}),
        ("edge", {"name": "edge", "positions": [0], "side": "end"}),
        ("reread", {"index": 0}),
        ("reread", {"name": "first", "positions": [0]}),
        ("reenter", {"jobs": [["candidate", "first"]] * 2, "calls": 4}),
        (
            "soak",
            {
                "sets": ["first"],
                "calls": 2,
                "budget_s": 1.0,
                "least": 0,
                "least_s": 1.0,
                "held_bytes": 1 << 20,
            },
        ),
        ("surroundings", {"tables": True}),
        ("warm", {"a": "candidate", "b": "candidate", "sets": ["first", "second"]}),
        ("look", {"sets": ["first"]}),
        ("spin", {"sets": ["first", "second"], "calls": 2, "start": 0, "keep": True}),
        (
            "unlike",
            {"start": 0, "shift": 0, "judged": 0, "ring": 2, "contents": 2, "limit_s": 1.0},
        ),
    ):
        path = str(child.reserve_file())
        child.call(verb, **{"slot": "candidate", "inputs": "first", "path": path, **fields})


def list_loaded_modules(child: Child) -> list[str]:
    """Modules of the judge in a child, as a source sees them there."""
    path = child.reserve_file()
    answer = child.call("read_source", text=SPY, entry="Model", seed=0, path=str(path))
    assert load_tensors(answer["layout"], path, CPU)
    names: list[str] = unpack_arguments(answer["form"]["init"], ())["args"][0]
    return names


def _check_modules(names: list[str]) -> None:
    assert f"{JUDGE}.worker.session" in names or f"{JUDGE}.wire.channel" in names
    assert [name for name in names if _is_within(name, FORBIDDEN)] == []


def test_a_child_has_loaded_nothing_of_the_judges() -> None:
    with Child(LIMITS, Contract()) as child:
        _check_modules(list_loaded_modules(child))
        _serve_requests(child)
    with Child(LIMITS, Contract()) as child:
        _serve_requests(child)
        _check_modules(list_loaded_modules(child))


@pytest.mark.parametrize("worker", WORKERS[1:])
def test_children_that_serve_more_have_loaded_none_either(worker: str) -> None:
    with Child(LIMITS, Contract(), worker=worker) as child:
        _check_modules(list_loaded_modules(child))


def test_a_forked_child_has_loaded_none_either() -> None:
    with ForkServer() as fork_server, Child(LIMITS, Contract(), fork_server=fork_server) as child:
        assert isinstance(child._process, ForkedProcess)
        _serve_requests(child)
        _check_modules(list_loaded_modules(child))


@pytest.mark.skipif(
    not landlock.find_version() or not seccomp.is_supported(),
    reason="level 1 only: no foreign code",
)
def test_a_child_for_foreign_code_has_loaded_none_either() -> None:
    with Child(replace(LIMITS, trust="foreign"), Contract()) as child:
        _check_modules(list_loaded_modules(child))
