"""What Inductor compiled on one machine, for the start of another that has no compiler:
`cudal1 warmup --with-inductor`.

A decision for `inductor` is a schedule: the starting process lets Inductor compile the Program, and
finds the result in Inductor's cache if it was compiled there before. `cli.commands.inductor_ahead`
fills an empty cache in a fresh process, as a start would. `store_artifacts` keeps the files as an
alias of the regions, which signatures, bundles and the Hub treat like every other.
`provide_artifacts` puts them where Inductor looks.

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
from torch_cudal1.core.path_shims import script_on_path
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import set_triton_folder
from torch_cudal1.store.cache.inductor_files import pack_folder, unpack_folder
from torch_cudal1.store.context import TuneContext

__all__ = [
    "TRITON_PREFIX",
    "choose_inductor_options",
    "provide_artifacts",
    "read_compiler_answers",
    "store_artifacts",
]

# Below Inductor's folder: Triton's files for device 0, which the warm-up used.
TRITON_PREFIX = "triton/0/"
# what Inductor asks for by default; its versions are part of what a compiled file is called
_COMPILER = "g++"
_COMPILER_OPTIONS = ("--version", "-v")
# Re-entrant, because it is held while the caller builds, which may come here again.
_lock = threading.RLock()
_placed_names: set[str] = set()  # what this process has put in place, or could not
# -S and -E: the shim must not import site packages or obey PYTHON variables.
_COMPILER_SHIM = """#!{python} -SE
import base64, sys
answer = {answers!r}.get(sys.argv[1] if len(sys.argv) == 2 else "")
if answer is None:
    sys.exit("this machine has no C++ compiler, and what is asked for was not compiled ahead")
sys.stdout.buffer.write(base64.b64decode(answer[0]))
sys.stderr.buffer.write(base64.b64decode(answer[1]))
"""


def choose_inductor_options(place: TuneContext) -> dict[str, Any] | None:
    """Inductor options for making or using files compiled ahead: no precompiled headers, which only
    a compiler can look up. None where the defaults will do.
    """
    return (
        # Inductor looks a precompiled header up by calling the compiler, which the starting machine
        # lacks.
        {"cpp_cache_precompile_headers": False}
        if place.settings.inductor_files and place.device.type == "cpu"
        else None
    )


@contextlib.contextmanager
def provide_artifacts(keys: Sequence[str], place: TuneContext) -> Iterator[None]:
    """While these regions are built, what was compiled ahead for them lies where Inductor looks, if
    the settings allow it.
    """
    # These files are code that Inductor unpickles. A user has to ask for them.
    if not place.settings.inductor_files:
        yield
        return
    name = _record_name(keys, place)
    # PATH and `_placed_names` belong to the whole process.
    with _lock:
        value = place.find_decision_record(name)
        if isinstance(value, Refusal):
            # Absence is the common case and no event.
            if value.reason != "absent":
                telemetry.record(
                    "resolve",
                    "inductor_files_refused",
                    keys[0] if keys else "",
                    reason=value.reason,
                )
            yield
            return
        # Once a process: Inductor finds the files again by itself.
        if name not in _placed_names:
            # Before the attempt, since files that cannot be placed now cannot be later.
            _placed_names.add(name)
            _unpack_artifacts(value.get("inductor"), keys, place.device)
        # After unpacking: Inductor asks the compiler for its version to find the files' names.
        with _shim_compiler(value.get("compiler")):
            yield


def store_artifacts(keys: Sequence[str], folder: Path, place: TuneContext) -> Refusal | None:
    """Remember the Inductor cache `folder` for these regions, unless it holds nothing."""
    files = pack_folder(folder)
    if isinstance(files, Refusal):
        return files
    if not files:
        return None
    value = {
        "regions": list(keys),
        "inductor": files,
        # On CUDA the names of the files do not contain the C++ compiler.
        "compiler": read_compiler_answers() if place.device.type == "cpu" else None,
    }
    stored = place.cache.put_decision_record(
        _record_name(keys, place), value, place.target, place.contract
    )
    return stored if isinstance(stored, Refusal) else None


def read_compiler_answers() -> dict[str, list[str]] | None:
    """What the C++ compiler says of itself, by option: base64 of stdout and stderr. None where
    there is none.
    """
    answers: dict[str, list[str]] = {}
    for option in _COMPILER_OPTIONS:
        try:
            result = subprocess.run(
                # No shell, and a bound: a broken wrapper must not hang the warm-up.
                [_COMPILER, option],
                capture_output=True,
                timeout=30,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        answers[option] = [
            # base64, since a compiler may write bytes that are no UTF-8, and the record is JSON.
            base64.b64encode(stream).decode()
            for stream in (result.stdout, result.stderr)
        ]
    return answers


def _record_name(keys: Sequence[str], place: TuneContext) -> str:
    """The alias's name: the regions, and what the files were made for."""
    target = place.target
    made_for = [
        "inductor files",
        # Inductor's files serve exactly these versions: another one would ask for other names.
        target.torch,
        target.triton,
        platform.python_version(),
        target.arch,
        target.sku,
        *keys,
    ]
    return hashlib.sha256(json.dumps(made_for).encode()).hexdigest()


def _unpack_artifacts(files: Any, keys: Sequence[str], device: torch.device) -> None:
    # Inductor is imported only where files are to be placed.
    from torch._inductor.runtime.cache_dir_utils import (
        cache_dir,
        triton_cache_dir,
    )

    folder, region = Path(cache_dir()), keys[0] if keys else ""
    parts = [(files, folder)]
    if device.type == "cuda" and isinstance(files, Mapping):
        triton = {
            # Triton keeps a folder for each device, and this start's device may have another index.
            name.removeprefix(TRITON_PREFIX): files[name]
            for name in files
            if str(name).startswith(TRITON_PREFIX)
        }
        rest = {name: files[name] for name in files if not str(name).startswith(TRITON_PREFIX)}
        parts = [(triton, set_triton_folder(triton_cache_dir(device.index or 0))), (rest, folder)]
    for some, where in parts:
        written = unpack_folder(some, where)
        if isinstance(written, Refusal):
            telemetry.record("resolve", "inductor_files_refused", region, reason=written.reason)
            return
        telemetry.record("resolve", "inductor_files", region, written=written)


@contextlib.contextmanager
def _shim_compiler(recorded: object) -> Iterator[None]:
    """Where this machine has no C++ compiler: put a script on PATH that repeats the recorded
    answers of the other machine's compiler to `--version` and `-v`, and compiles nothing.
    """
    # A real compiler always comes first.
    if shutil.which(_COMPILER) or not isinstance(recorded, Mapping):
        yield
        return
    answers = {
        option: [str(part) for part in recorded[option]]
        for option in _COMPILER_OPTIONS
        # The record comes from a file, so only known options are taken out of it.
        if option in recorded
    }
    with script_on_path(_COMPILER, _COMPILER_SHIM.format(python=sys.executable, answers=answers)):
        yield
