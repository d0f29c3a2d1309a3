"""A start without a C++ compiler: what Inductor compiled elsewhere serves it if a publisher signed
it and the settings allow it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entries import add_one_to_output, plant
from tests.signing import allow, make_signer
from torch_cudal1.api.fleet.warmup_task import WarmupOrder
from torch_cudal1.api.targets import load
from torch_cudal1.cli.commands.inductor_ahead import collect
from torch_cudal1.core.settings import Settings
from torch_cudal1.search import inductor_artifacts
from torch_cudal1.store.bundle.bundle_file import write_bundle
from torch_cudal1.store.bundle.imported import import_bundle
from torch_cudal1.store.cache.inductor_files import pack_folder
from torch_cudal1.store.cache.inventory import take_inventory
from torch_cudal1.store.cache.local_cache import LocalCache

MODEL = """
import torch

def make():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Softmax(-1)).eval()
    return module, (torch.ones(3, 8),)
"""
START = """
import json, sys
import cudal1
from torch_cudal1.core import telemetry
sys.path.insert(0, sys.argv[1])
import model
import torch
module, inputs = model.make()
module, inputs = module.to(sys.argv[2]), tuple(one.to(sys.argv[2]) for one in inputs)
with torch.no_grad():
    own = module(*inputs)
    cudal1.accelerate(module, inputs, on_miss="error", strictness="warn")
    shift = float((module(*inputs) - own).mean())
report = cudal1.report()
told = [event.facts["reason"] for event in report.events if event.what in ("inductor_files_refused", "fallback")]
print(json.dumps({"shift": round(shift, 3), "told": told, "fallbacks": report.counters.get("fallbacks", 0)}))
"""

BUILD = """
import dataclasses, os, sys
from pathlib import Path
import torch
from torch_cudal1.search import inductor_artifacts
from torch_cudal1.store.context import make_context
from torch_cudal1.core.settings import Settings
from torch_cudal1.core.path_shims import file_program_shim
from triton.runtime.build import compile_module_from_src

SOURCE = '''
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {0, 0, 0, 0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "stub", "", -1, methods, 0, 0, 0, 0};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&module); }
'''
place = make_context(torch.device("cpu"), Settings(cache_dir=sys.argv[1], inductor_files=os.environ["FILES"] == "true"))
place = dataclasses.replace(place, device=torch.device("cuda", 0))
with inductor_artifacts.provide_artifacts(["region"], place), file_program_shim(place.device):
    print(compile_module_from_src(SOURCE, "stub").answer())
if sys.argv[2:]:
    print(inductor_artifacts.store_artifacts(["region"], Path(sys.argv[2]), place) or "")
"""


def compile_ahead(device: str, folder: Path) -> Path:
    """A folder with the model, and a cache with a decision for it and what Inductor compiled."""
    (folder / "model.py").write_text(MODEL)
    target = f"{folder / 'model.py'}:make"
    (loaded,) = load(target, device=device)
    with torch.no_grad():
        plant(
            loaded.module,
            loaded.inputs,
            folder / "made",
            change=add_one_to_output,
            schedule="inductor",
        )
    order = WarmupOrder(Settings(cache_dir=folder / "made"), device=device)
    assert collect([target], order) == {}
    return folder


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a bundle that a publisher of `publishers.toml` signed, and one of which he
    signed the entries only.
    """
    folder = compile_ahead("cpu", tmp_path_factory.mktemp("shipped"))
    cache = LocalCache(folder / "made")
    signer = make_signer(folder)
    assert not cache.sign(signer, lambda entry: True).failed  # the entries, and no alias
    write_bundle(folder / "unsigned-files.bundle", take_inventory(cache))
    assert not cache.sign(signer).failed
    allow(folder / "publishers.toml", team=signer.public)
    write_bundle(folder / "signed.bundle", take_inventory(cache))
    return folder


def start_process(
    shipped: Path, tmp_path: Path, bundle: str = "signed", device: str = "cpu", **settings: str
) -> dict[str, Any]:
    """What a fresh process says that has an imported bundle ("": the cache itself), no Inductor
    cache, and no program on PATH.
    """
    if bundle:
        import_bundle(shipped / f"{bundle}.bundle", tmp_path / "cache")
    (tmp_path / "no-programs").mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH_CUDAL1_", "TRITON_", "CXX", "CC", "CUDA_HOME"))
    }
    environment |= {
        "PATH": str(tmp_path / "no-programs"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "TORCH_CUDAL1_CACHE_DIR": str(tmp_path / "cache" if bundle else shipped / "made"),
        "TORCH_CUDAL1_PUBLISHERS": str(shipped / "publishers.toml"),
        **{f"TORCH_CUDAL1_{name.upper()}": value for name, value in settings.items()},
    }
    command = [sys.executable, "-c", START, str(shipped), device]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def test_a_machine_without_a_compiler_runs_what_was_compiled_ahead(
    artifacts: Path, tmp_path: Path
) -> None:
    assert start_process(artifacts, tmp_path, inductor_files="true") == {
        "shift": 1.0,
        "told": [],
        "fallbacks": 0,
    }


def test_without_the_setting_nothing_of_it_is_taken_and_the_baseline_runs(
    artifacts: Path, tmp_path: Path
) -> None:
    outcome = start_process(artifacts, tmp_path)
    assert (outcome["shift"], outcome["fallbacks"]) == (0.0, 1)
    assert "No working C++ compiler" in outcome["told"][0]
    assert not list((tmp_path / "inductor").rglob("*.so"))


def test_files_that_nobody_signed_are_never_unpacked(artifacts: Path, tmp_path: Path) -> None:
    outcome = start_process(artifacts, tmp_path, bundle="unsigned-files", inductor_files="true")
    assert (outcome["shift"], outcome["fallbacks"]) == (0.0, 1)
    assert "is refused" in outcome["told"][0]
    assert "sign" in outcome["told"][0]
    assert not list((tmp_path / "inductor").rglob("*.so"))


@pytest.mark.parametrize("is_users", [True, False], ids=["the user's folder", "Inductor's folder"])
def test_what_triton_built_lies_where_triton_looks(
    is_users: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv(
        "TRITON_CACHE_DIR", str(tmp_path / "triton")
    )  # so that it is taken back whatever is set
    if not is_users:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    (tmp_path / "made/triton/0/ABC").mkdir(parents=True)
    (tmp_path / "made/triton/0/ABC/cuda_utils.so").write_bytes(b"library")
    (tmp_path / "made/fxgraph").mkdir()
    (tmp_path / "made/fxgraph/graph").write_bytes(b"graph")
    inductor_artifacts._unpack_artifacts(
        pack_folder(tmp_path / "made"), ["region"], torch.device("cuda", 1)
    )
    triton = tmp_path / "triton" if is_users else tmp_path / "inductor/triton/1"
    assert (triton / "ABC/cuda_utils.so").read_bytes() == b"library"
    assert (tmp_path / "inductor/fxgraph/graph").read_bytes() == b"graph"
    assert os.environ["TRITON_CACHE_DIR"] == str(triton)


@pytest.mark.parametrize(
    "asks_file", [True, False], ids=["made with the program `file`", "made without it"]
)
def test_a_process_without_a_program_finds_what_triton_built(
    asks_file: bool, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cc", "gcc", "as", "ld", *(["file"] if asks_file else [])):
        if (program := shutil.which(name)) is not None:
            (tools / name).symlink_to(program)
    if asks_file and not (tools / "file").exists():
        pytest.skip("no program `file` here")
    (tmp_path / "none").mkdir()

    def build_driver(
        programs: Path, inductor: Path, *more: str, files: str = "true", **variables: str
    ) -> list[str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TRITON_", "TORCH_CUDAL1_", "CC"))
        }
        environment |= {
            "PATH": str(programs),
            "TORCHINDUCTOR_CACHE_DIR": str(inductor),
            "FILES": files,
            **variables,
        }
        command = [sys.executable, "-c", BUILD, str(tmp_path / "cache"), *more]
        process = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=Path(__file__).parents[2],
        )
        assert process.returncode == 0, process.stderr[-3000:]
        return process.stdout.splitlines()

    produced = tmp_path / "made"
    assert build_driver(
        tools,
        produced,
        str(produced),
        TRITON_CACHE_DIR=str(produced / inductor_artifacts.TRITON_PREFIX),
    ) == ["42", ""]
    assert build_driver(tmp_path / "none", tmp_path / "inductor") == ["42"]
    # and so does one beside the very folder that was filled, for which nothing was stored
    assert build_driver(
        tmp_path / "none",
        produced,
        files="false",
        TRITON_CACHE_DIR=str(produced / inductor_artifacts.TRITON_PREFIX),
    ) == ["42"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_gpu_machine_without_a_compiler_runs_what_was_compiled_ahead(tmp_path: Path) -> None:
    produced = compile_ahead("cuda", tmp_path)
    assert start_process(produced, tmp_path, bundle="", device="cuda", inductor_files="true") == {
        "shift": 1.0,
        "told": [],
        "fallbacks": 0,
    }
