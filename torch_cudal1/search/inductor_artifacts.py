"""What Inductor compiled on one machine, for the start of another that has no compiler:
`cudal1 warmup --with-inductor`.

A decision for `inductor` is a schedule: the starting process lets Inductor compile the Program, and
finds the result in Inductor's cache if it was compiled there before. `cli.commands.inductor_ahead`
fills an empty cache in a fresh process, as a start would. `store` keeps the files as an alias of
the regions, which signatures, bundles and the Hub treat like every other. `ready` puts them where
Inductor looks.

They are code: Inductor unpickles and runs them. So nothing is taken without the setting
`inductor_files`, and from outside the own cache nothing without the signature of an allowed
publisher. They serve the same torch, Triton, Python and device model, and on a CPU only the same
folders of Python and torch and the same C++ compiler's output: its name is in what Inductor looks
for.

Not covered: graphs of `torch.compile` (only `accelerate`), and the whole training step when
torch.compile itself won it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.path_shims import on_path
from torch_cudal1.core.settings import triton_folder
from torch_cudal1.ir.records import Miss
from torch_cudal1.store.cache.files import NotStored
from torch_cudal1.store.cache.inductor_files import pack, unpack
from torch_cudal1.store.context import Place

__all__ = ["TRITON", "compiler_here", "inductor_options", "ready", "store"]

TRITON = "triton/0/"  # below Inductor's folder, of the device that a start of one target uses
# what Inductor asks for by default; its versions are part of what a compiled file is called
_COMPILER = "g++"
_ASKED = ("--version", "-v")
_lock = threading.RLock()
_known: set[str] = set()  # what this process has put in place, or could not
_STAND_IN = """#!{python} -SE
import base64, sys
told = {told!r}.get(sys.argv[1] if len(sys.argv) == 2 else "")
if told is None:
    sys.exit("this machine has no C++ compiler, and what is asked for was not compiled ahead")
sys.stdout.buffer.write(base64.b64decode(told[0]))
sys.stderr.buffer.write(base64.b64decode(told[1]))
"""


def inductor_options(place: Place) -> dict[str, Any] | None:
    """What Inductor must be told where files compiled ahead are used or made: a precompiled header
    is looked up by a compiler.
    """
    return (
        {"cpp_cache_precompile_headers": False}
        if place.settings.inductor_files and place.device.type == "cpu"
        else None
    )


@contextlib.contextmanager
def ready(keys: Sequence[str], place: Place) -> Iterator[None]:
    """While these regions are built, what was compiled ahead for them lies where Inductor looks, if
    the settings allow it.
    """
    if not place.settings.inductor_files:
        yield
        return
    name = _name(keys, place)
    with _lock:
        value = place.alias(name)
        if isinstance(value, Miss):
            if value.reason != "absent":
                telemetry.record(
                    "resolve",
                    "inductor_files_refused",
                    keys[0] if keys else "",
                    reason=value.reason,
                )
            yield
            return
        if name not in _known:
            _known.add(name)
            _put_in_place(value.get("inductor"), keys, place.device)
        with _stand_in(value.get("compiler")):
            yield


def store(keys: Sequence[str], folder: Path, place: Place) -> str:
    """Remember the Inductor cache `folder` for these regions; why it could not be, "" if it was or
    holds nothing.
    """
    files = pack(folder)
    if isinstance(files, Miss) or not files:
        return files.reason if isinstance(files, Miss) else ""
    value = {
        "regions": list(keys),
        "inductor": files,
        "compiler": compiler_here() if place.device.type == "cpu" else None,
    }
    stored = place.cache.put_alias(_name(keys, place), value, place.target, place.contract)
    return stored.reason if isinstance(stored, NotStored) else ""


def compiler_here() -> dict[str, list[str]] | None:
    """What the C++ compiler says of itself, by option: base64 of stdout and stderr. None where
    there is none.
    """
    told: dict[str, list[str]] = {}
    for option in _ASKED:
        try:
            done = subprocess.run([_COMPILER, option], capture_output=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        told[option] = [base64.b64encode(stream).decode() for stream in (done.stdout, done.stderr)]
    return told


def _name(keys: Sequence[str], place: Place) -> str:
    """The alias's name: the regions, and what the files were made for."""
    target = place.target
    made_for = [
        "inductor files",
        target.torch,
        target.triton,
        platform.python_version(),
        target.arch,
        target.sku,
        *keys,
    ]
    return hashlib.sha256(json.dumps(made_for).encode()).hexdigest()


def _put_in_place(files: Any, keys: Sequence[str], device: torch.device) -> None:
    from torch._inductor.runtime.cache_dir_utils import (
        cache_dir,
        triton_cache_dir,
    )  # not before something is to be put there

    folder, region = Path(cache_dir()), keys[0] if keys else ""
    parts = [(files, folder)]
    if device.type == "cuda" and isinstance(files, Mapping):
        triton = {
            name.removeprefix(TRITON): files[name] for name in files if str(name).startswith(TRITON)
        }
        rest = {name: files[name] for name in files if not str(name).startswith(TRITON)}
        parts = [(triton, triton_folder(triton_cache_dir(device.index or 0))), (rest, folder)]
    for some, where in parts:
        written = unpack(some, where)
        if isinstance(written, Miss):
            telemetry.record("resolve", "inductor_files_refused", region, reason=written.reason)
            return
        telemetry.record("resolve", "inductor_files", region, written=written)


@contextlib.contextmanager
def _stand_in(told: object) -> Iterator[None]:
    """Where this machine has no C++ compiler: one on PATH that says what the other machine's said,
    and compiles nothing.
    """
    if shutil.which(_COMPILER) or not isinstance(told, Mapping):
        yield
        return
    answers = {option: [str(part) for part in told[option]] for option in _ASKED if option in told}
    with on_path(_COMPILER, _STAND_IN.format(python=sys.executable, told=answers)):
        yield
