"""Reads the identities of the objects behind the names of torch, Python and the judge's modules in
this process.

The parent compares the identities, or their digests, with those from before the candidate was
loaded. Code in the same process can still write into the closures here (through `gc`, frames or
ctypes), or restore everything before each read; the parent's comparison of results must find what
such code does.
"""

from __future__ import annotations

import builtins
import copy
import copyreg
import hashlib
import inspect
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
import torch.testing

__all__ = ["digest_identities", "list_module_identities", "read_identities"]

_WATCHED_MODULES = (
    *(
        "__main__",
        "builtins",
        "time",
        "os",
        "json",
        "struct",
        "socket",
        "signal",
        "threading",
        "random",
        "gc",
        "ctypes",
        "hashlib",
    ),
    *(
        "torch",
        "torch._C",
        "torch._C._autograd",
        "torch._C._nn",
        "torch._tensor",
        "torch.testing",
        "torch.testing._comparison",
    ),
    *(
        "torch.nn.functional",
        "torch.nn.init",
        "torch.nn.modules.module",
        "torch.autograd",
        "torch.autograd.grad_mode",
    ),
    *(
        "torch.cuda",
        "torch.cuda.streams",
        "torch.cuda.graphs",
        "torch.cuda.random",
        "torch.random",
        "torch.overrides",
    ),
    *(
        "torch.storage",
        "torch.utils._pytree",
        "torch.utils._python_dispatch",
        "torch._ops",
        "safetensors.torch",
        "torch.nn.parameter",
        "torch.func",
        "torch.linalg",
        "torch.fft",
        "torch.special",
        "copy",
        "copyreg",
        "pickle",
        "operator",
        "functools",
        "itertools",
        "math",
        "inspect",
        "importlib",
        "importlib.util",
        "contextlib",
        "numpy",
        "numpy.linalg",
    ),
    *(
        "torch.nn",
        "torch.optim",
        "torch.functional",
        "torch._VF",
        "torch.amp",
        "torch.sparse",
        "torch.library",
        "torch.utils.checkpoint",
        "torch.utils.hooks",
    ),
)
_PACKAGE = "torch_cudal1."
# All modules of these packages that are loaded before the candidate.
_WATCHED_PACKAGES = (
    _PACKAGE,
    "torch.nn.modules.",
    "torch.nn.utils.",
    "torch.optim.",
    "torch.autograd.",
    "torch.amp.",
)
# Modules of which the numbers and dtypes are read too: they never change by themselves.
_MODULES_WITH_CONSTANTS = frozenset(
    ("torch", "torch.nn.functional", "torch.nn.init", "torch.functional", "math", "numpy")
)
_CONSTANTS = (
    *(torch.dtype, torch.layout, torch.memory_format, torch.qscheme, torch.Generator),
    *(float, complex, int),
)
# Python writes some of these itself, such as __warningregistry__ at a first warning.
_IGNORED_NAMES = frozenset(
    (
        "__doc__",
        "__module__",
        "__dict__",
        "__weakref__",
        "__annotations__",
        "_",
        "__warningregistry__",
    )
)
_WATCHED_CLASSES = (
    torch.Tensor,
    torch._C.TensorBase,
    torch.nn.Parameter,
    torch.Generator,
    torch.UntypedStorage,
)
_PACKAGES_OF_CLASSES = (
    "torch.nn.modules",
    "torch.nn.utils",
    "torch.nn.parameter",
    "torch.optim",
    "torch.autograd",
    "torch.amp",
    "torch.utils._contextlib",
    "torch.cuda.streams",
    _PACKAGE + "judge",
)
# Class -> how it is copied or pickled. Honest code adds its own classes.
_REDUCERS: dict[str, dict[Any, Any]] = {
    "copyreg.dispatch_table": copyreg.dispatch_table,
    "copy._copy_dispatch": getattr(copy, "_copy_dispatch", {}),
    "copy._deepcopy_dispatch": getattr(copy, "_deepcopy_dispatch", {}),
}
_METHODS = (staticmethod, classmethod)
# Kept alive: a replacement could get the identity of an object that was freed.
_kept_alive: list[Any] = []
Table: TypeAlias = dict[str, dict[str, list[int]]]


def list_module_identities() -> dict[str, int]:
    """The identity of each loaded module, by name."""
    return {name: id(module) for name, module in list(sys.modules.items())}


def _iter_members(owner: Any) -> Iterator[tuple[str, Any]]:
    reads_constants = isinstance(owner, ModuleType) and owner.__name__ in _MODULES_WITH_CONSTANTS
    # vars, not getattr: no code of a lazy module or of a descriptor runs.
    for name, value in list(vars(owner).items()):
        if (
            callable(value)
            or isinstance(value, (property, staticmethod, classmethod, ModuleType))
            or inspect.isgetsetdescriptor(value)
            or (reads_constants and isinstance(value, _CONSTANTS) and not name.startswith("_"))
        ):
            yield name, value


def _iter_functions(value: Any) -> Iterator[FunctionType]:
    """The Python functions whose code runs when `value` is called or read: itself, those inside a
    method or property, and those that a wrapper has in its closure.
    """
    inner = getattr(value, "__func__", value) if isinstance(value, _METHODS) else value
    for part in (value.fget, value.fset) if isinstance(value, property) else (inner,):
        if isinstance(part, FunctionType):
            yield part
            contents = map(_read_cell, part.__closure__ or ())
            yield from (each for each in contents if isinstance(each, FunctionType))


def _read_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    # an empty cell
    except ValueError:
        return None


def _wrap_optimizer_steps() -> None:
    """Have torch wrap `step` of its optimizers now. It does so when the first one of a class is made,
    which would seem to be the candidate's doing.
    """
    kinds = [
        kind
        for kind in _list_classes("torch.optim")
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]
    # Base classes first: an inherited `step` that is wrapped already is left alone.
    for kind in sorted(kinds, key=lambda kind: len(kind.__mro__)):
        object.__new__(kind)._patch_step_function()


def _iter_owners() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if name in _WATCHED_MODULES or name.startswith(_WATCHED_PACKAGES):
            yield name, module
    for kind in (
        *_WATCHED_CLASSES,
        *(kind for package in _PACKAGES_OF_CLASSES for kind in _list_classes(package)),
    ):
        yield f"{kind.__module__}.{kind.__qualname__}", kind


def _list_classes(prefix: str) -> list[type]:
    classes = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith(prefix)
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith(prefix)
    }
    return sorted(classes, key=lambda kind: (kind.__module__, kind.__qualname__))


def _find_hidden_names(owner: Any) -> frozenset[str]:
    """Names that a new member of `owner` would hide: those of its base classes, or, for a module,
    of Python's built-ins.
    """
    # A new global in a module hides the built-in of that name from its functions.
    bases = owner.__mro__[1:] if isinstance(owner, type) else [builtins]
    return frozenset(name for base in bases for name in vars(base) if name not in _IGNORED_NAMES)


@dataclass(frozen=True)
class _Watched:
    """What is read.

    - owners: (label, module or class). names: label -> the members that are read.
    - functions: label -> member -> the Python functions in it.
    - hiding: label -> names that are not members yet, and would hide an inherited one.
    - classes: those whose entries in `_REDUCERS` are read, by name.
    - modules: names of the modules loaded now.
    """

    owners: list[tuple[str, Any]]
    names: dict[str, list[str]]
    functions: dict[str, dict[str, list[FunctionType]]]
    hiding: dict[str, frozenset[str]]
    classes: dict[str, Any]
    modules: list[str]


def _choose_watched() -> _Watched:
    _wrap_optimizer_steps()
    owners = list(dict(_iter_owners()).items())
    members = {label: dict(_iter_members(owner)) for label, owner in owners}
    functions = {
        label: {
            name: parts for name, value in values.items() if (parts := [*_iter_functions(value)])
        }
        for label, values in members.items()
    }
    _kept_alive.append(members)
    for part in (
        each for named in functions.values() for parts in named.values() for each in parts
    ):
        cells = map(_read_cell, part.__closure__ or ())
        named = part.__kwdefaults__ or {}
        _kept_alive.append((part.__code__, part.__defaults__, named, *named.values(), *cells))
    classes = {owner for _, owner in owners if isinstance(owner, type)}.union(*_REDUCERS.values())
    _kept_alive.extend(dict(table) for table in _REDUCERS.values())
    return _Watched(
        owners,
        names={label: list(values) for label, values in members.items()},
        functions=functions,
        hiding={label: _find_hidden_names(owner) - vars(owner).keys() for label, owner in owners},
        classes={f"{kind.__module__}.{kind.__qualname__}": kind for kind in classes},
        # Modules that are imported later are not watched: honest code imports too.
        modules=list(sys.modules),
    )


def _bind_function_reader() -> Callable[[FunctionType], list[int]]:
    identity, empty = id, ValueError

    def read_function(part: FunctionType) -> list[int]:
        # Replacing its code, a default or what its closure holds changes a function, and not its
        # identity.
        named, cells = part.__kwdefaults__, part.__closure__
        parts = [identity(part.__code__), identity(part.__defaults__), identity(named)]
        if named:
            parts += map(identity, named.values())
        for cell in cells or ():
            try:
                parts.append(identity(cell.cell_contents))
            except empty:
                parts.append(0)
        return parts

    return read_function


def _bind_readers(watched: _Watched) -> tuple[Callable[[], Table], Callable[[], dict[str, str]]]:
    """Two functions: one reads all identities, one their digests and that of the loaded modules.

    Digests are quicker to make, to send and to compare.
    """
    owners, names, hiding, loaded = watched.owners, watched.names, watched.hiding, watched.modules
    functions, classes, reducers = watched.functions, watched.classes, _REDUCERS
    once = {
        id(part): part for named in functions.values() for parts in named.values() for part in parts
    }
    # Bound now, before any source is loaded: a name patched later is noticed, and not used.
    identity, read, read_function = id, vars, _bind_function_reader()
    numbers, sha, module_table = array, hashlib.sha256, sys.modules

    def read_table() -> Table:
        table: Table = {}
        for label, owner in owners:
            members = read(owner)
            table[label] = {name: [identity(members.get(name))] for name in names[label]}
            for name, parts in functions[label].items():
                for part in parts:
                    table[label][name] += read_function(part)
            table[label] |= {
                f"+{name}": [identity(members[name])] for name in hiding[label] & members.keys()
            }
        for label, entries in reducers.items():
            table[label] = {name: [identity(entries.get(kind))] for name, kind in classes.items()}
        return table

    def read_digests() -> dict[str, str]:
        flat: list[int] = []
        for label, owner in owners:
            members = read(owner)
            flat += [identity(members.get(name)) for name in names[label]]
            if not hiding[label].isdisjoint(members):
                flat += (identity(members[name]) for name in hiding[label] if name in members)
        for part in once.values():
            flat += read_function(part)
        for entries in reducers.values():
            flat += [identity(entries.get(kind)) for kind in classes.values()]
        of_modules = [identity(module_table.get(name)) for name in loaded]
        return {
            "identities": sha(numbers("Q", flat)).hexdigest(),
            "modules": sha(numbers("Q", of_modules)).hexdigest(),
        }

    return read_table, read_digests


_readers: list[tuple[Callable[[], Table], Callable[[], dict[str, str]]]] = []


def _get_readers() -> tuple[Callable[[], Table], Callable[[], dict[str, str]]]:
    if not _readers:
        _readers.append(_bind_readers(_choose_watched()))
    return _readers[0]


def read_identities() -> Table:
    """Owner -> name -> identity of the object; for Python functions also of their code, defaults and
    what their closures hold.

    The first call of this function or of `digest_identities` fixes what is read. "+name" is a later
    member that hides one of a base class or a built-in.
    """
    return _get_readers()[0]()


def digest_identities() -> dict[str, str]:
    """The sha256 of all `read_identities`, and of the identities of the modules that were loaded at
    the first call.
    """
    return _get_readers()[1]()
