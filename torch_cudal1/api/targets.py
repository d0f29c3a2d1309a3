"""A TARGET of the command line, turned into modules and their inputs: `load("file.py:build")`.

It runs the user's own file or package, in this process, because the user named it; it never runs
anything generated. It does not move modules to a device unless asked, does not switch train/eval
and does not change the module. Whatever goes wrong is a `TargetError` of one paragraph.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree

from torch_cudal1.core.errors import TargetError
from torch_cudal1.core.kernelbench_format import NAMES, constructor_arguments

__all__ = ["LoadedTarget", "expand", "load", "move_to_device", "try_call"]

_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
# Weights and inputs of a target are the same at every load, so that results can be compared.
_SEED = 0


@dataclass(frozen=True)
class LoadedTarget:
    """A module and the positional inputs to call it with; `name` is the target's, for tables."""

    name: str
    module: torch.nn.Module
    inputs: tuple[Any, ...]


def load(target: str, *, device: str | None = None) -> tuple[LoadedTarget, ...]:
    """Every module that `target` leads to, on `device` if given ("cpu", "cuda"), else where the
    target put it.

    A folder of large models holds them all at once: to handle one at a time, load each of
    `expand(target)`. Raises TargetError.
    """
    return tuple(_load_target(single, device) for single in expand(target))


def expand(target: str) -> tuple[str, ...]:
    """The single targets that `target` stands for: a folder's KernelBench-style files in natural
    order, otherwise itself.

    Nothing is imported or run. Files of a folder that define none of Model, get_inputs,
    get_init_inputs are passed over. Raises TargetError.
    """
    folder = Path(target).expanduser()
    if not folder.is_dir():
        return (target,)
    # Natural order, so that "2_x.py" comes before "10_x.py" in tables.
    files = sorted(
        (p for p in folder.rglob("*.py") if not _is_hidden(p.relative_to(folder))),
        key=lambda p: _natural_sort_key(str(p)),
    )
    # Read as text: a folder may hold files that are no targets, and running them is not what was
    # asked.
    targets = tuple(
        str(path) for path in files if _list_top_level_names(path, str(path)) & set(NAMES)
    )
    if not targets:
        raise TargetError(
            target,
            f"the folder holds no KernelBench-style file ({len(files)} Python files were looked at)",
        )
    return targets


def try_call(loaded: LoadedTarget) -> None:
    """Call the module once, as it is, without gradients, so that inputs that do not fit are
    reported as the target's problem.

    Raises TargetError.
    """
    try:
        # Without gradients: nothing is kept for a backward that never comes.
        with torch.no_grad():
            loaded.module(*loaded.inputs)
    # The module is the user's own code, which may raise anything; all of it is the target's
    # problem.
    except Exception as error:
        raise TargetError(
            loaded.name,
            f"calling the module with its inputs failed with {_describe_error(error, None)}",
        ) from error


def _load_target(target: str, device: str | None) -> LoadedTarget:
    source, name = _split_target(target)
    path = Path(source).expanduser()
    # A name that ends with .py is never a package, so a misspelt file is reported as a missing
    # file.
    if source.endswith(".py") or path.is_file():
        if not path.is_file():
            raise TargetError(target, f"there is no file {source!r} in {Path.cwd()}")
        built = _from_file(target, path.resolve(), name)
    elif name:
        built = _build(target, _find_callable(target, _import(target, source), name))
    else:
        raise TargetError(
            target,
            f"there is no file or folder {source!r}, and no ':callable' says what to call in a package",
        )
    return _move_to_device(target, LoadedTarget(target, *_check_pair(target, built)), device)


def _split_target(target: str) -> tuple[str, str]:
    source, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    return source, name


def _from_file(target: str, path: Path, name: str) -> Any:
    # Checked before the file is run: what is missing is reported without side effects.
    defined = _list_top_level_names(path, target)
    missing = [part for part in NAMES if part not in defined]
    if not name and missing:
        raise TargetError(
            target,
            f"the file defines no {', no '.join(missing)}, and no ':callable' says what to call in it",
        )
    with _on_path(path.parent):
        module = _execute(target, path)
        return (
            _build(target, _find_callable(target, module, name))
            if name
            else _build_kernelbench_pair(target, module)
        )


def _build_kernelbench_pair(target: str, module: ModuleType) -> Any:
    model, get_inputs, get_init_inputs = (_find_callable(target, module, part) for part in NAMES)

    def build() -> Any:
        args, kwargs = constructor_arguments(get_init_inputs())
        return model(*args, **kwargs), get_inputs()

    return _build(target, build)


def _list_top_level_names(path: Path, target: str) -> set[str]:
    """Names bound at the top of a file, read without running it."""
    try:
        # Bytes, so that Python itself finds the encoding that the file declares.
        tree = ast.parse(path.read_bytes(), filename=str(path))
    # Some versions of Python raise ValueError for a source with null bytes (3.11.7: SyntaxError).
    except (SyntaxError, ValueError) as error:
        where = f"{path}:{getattr(error, 'lineno', '?')}"
        raise TargetError(
            target, f"the file is not valid Python ({where}: {_format_error_line(error)})"
        ) from error
    except OSError as error:
        raise TargetError(target, f"the file {path} cannot be read ({error.strerror})") from error
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    return names


def _execute(target: str, path: Path) -> ModuleType:
    # A name of its own per path: two files called model.py must not be one module. It stays in
    # sys.modules, as pickling needs.
    name = f"cudal1_target_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(target, f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as `import` does: dataclasses look their module up while it runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    # A script that calls `sys.exit` must not end this process. KeyboardInterrupt goes through.
    except (Exception, SystemExit) as error:
        # A half-executed module must not be found by the next load of the same file.
        del sys.modules[name]
        raise TargetError(
            target, f"importing it failed with {_describe_error(error, path)}"
        ) from error
    return module


def _import(target: str, name: str) -> ModuleType:
    with _on_path(Path.cwd()):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only the package that was asked for is "not there"; a missing import inside it is
            # another problem.
            if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                hint = f"there is no package {error.name!r} on the path or in {Path.cwd()}"
                raise TargetError(target, hint) from error
            raise TargetError(
                target, f"importing it failed with {_describe_error(error, None)}"
            ) from error
        except (Exception, SystemExit) as error:
            raise TargetError(
                target, f"importing it failed with {_describe_error(error, None)}"
            ) from error


def _find_callable(target: str, module: ModuleType, name: str) -> Callable[..., Any]:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if callable(value):
        return value  # type: ignore[no-any-return]
    members = {
        key: value
        for key, value in vars(module).items()
        # Names that the module only imported would fill the message.
        if getattr(value, "__module__", None) == module.__name__
    }
    public = sorted(
        key for key, value in members.items() if callable(value) and not key.startswith("_")
    )
    kind = (
        "no callable"
        if value is None
        else f"an object of type {type(value).__name__!r}, not a callable, as"
    )
    raise TargetError(
        target, f"it holds {kind} {name!r}; callables there: {', '.join(public[:12]) or 'none'}"
    )


def _build(target: str, make: Callable[[], Any]) -> Any:
    path = Path(_split_target(target)[0]).expanduser()
    try:
        # The user's generators go on as before. No devices: forking theirs would initialise CUDA.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            return make()
    except (Exception, SystemExit) as error:
        raise TargetError(
            target,
            f"building it failed with {_describe_error(error, path.resolve() if path.is_file() else None)}",
        ) from error


def _check_pair(target: str, built: Any) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    if not isinstance(built, (tuple, list)) or len(built) != 2:
        size = f" of {len(built)}" if isinstance(built, (tuple, list)) else ""
        raise TargetError(
            target, f"it returned {type(built).__name__!r}{size}; a pair (module, inputs) is needed"
        )
    module, inputs = built
    if not isinstance(module, torch.nn.Module):
        raise TargetError(
            target,
            f"the first of the pair is of type {type(module).__name__!r}; a torch.nn.Module is needed",
        )
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, (tuple, list)):
        raise TargetError(
            target,
            f"the inputs are of type {type(inputs).__name__!r}; a tuple of positional inputs is needed",
        )
    tensors = 0
    for path, leaf in _pytree.tree_flatten_with_path(tuple(inputs))[0]:
        if not isinstance(leaf, (torch.Tensor, *_SCALARS)):
            where = f"inputs{_pytree.keystr(path)}"
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            raise TargetError(
                target,
                f"{where} is of type {kind!r}; tensors, numbers and nested lists, tuples and dicts of them are allowed",
            )
        tensors += isinstance(leaf, torch.Tensor)
    if not tensors:
        raise TargetError(
            target, "the inputs hold no tensor, so there is nothing to specialise on or to measure"
        )
    return module, tuple(inputs)


def move_to_device(
    module: torch.nn.Module, inputs: tuple[Any, ...], device: str
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """The module and every tensor of the inputs on `device`. Raises what torch raises when it
    cannot.
    """
    return module.to(device), _pytree.tree_map(
        lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, inputs
    )


def _move_to_device(target: str, loaded: LoadedTarget, device: str | None) -> LoadedTarget:
    try:
        return (
            loaded
            if device is None
            else LoadedTarget(loaded.name, *move_to_device(loaded.module, loaded.inputs, device))
        )
    except (RuntimeError, AssertionError) as error:
        # AssertionError: torch was built without CUDA. RuntimeError: no GPU, or out of memory.
        raise TargetError(
            target, f"it cannot be moved to {device!r} ({_format_error_line(error)})"
        ) from error


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Neighbouring files can be imported while the target runs, as with `python file.py`; the path
    is as before afterwards.
    """
    # A copy of the whole list: the target itself may change the path.
    saved = list(sys.path)
    # First, as with `python file.py`: a neighbouring file wins over an installed package of its
    # name.
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = saved


def _describe_error(error: BaseException, path: Path | None) -> str:
    """The last line of an exception and where: in the user's file if the traceback passes through
    it.
    """
    frames = traceback.extract_tb(error.__traceback__)
    in_file = [frame for frame in frames if path is not None and Path(frame.filename) == path]
    outside = [
        frame
        for frame in frames
        # Frames of this file and of the import system say nothing to the author of a target.
        if Path(frame.filename) != Path(__file__) and "importlib" not in frame.filename
    ]
    at = (in_file or outside or frames)[-1:]
    return _format_error_line(error) + (
        f" at {at[0].filename}:{at[0].lineno} in {at[0].name}" if at else ""
    )


def _format_error_line(error: BaseException) -> str:
    return " ".join(traceback.format_exception_only(error)[-1].split())


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _natural_sort_key(text: str) -> list[tuple[int, str]]:
    """Sort key under which "2_x.py" comes before "10_x.py"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
