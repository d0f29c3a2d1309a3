"""Reads the identities of the objects behind the names of torch, Python and the judge's modules in
this process.

The parent compares the identities, or their digests, with those from before the candidate was
loaded. Code in the same process can still write into the closures here (through `gc`, frames or
ctypes), or restore everything before each read; the parent's comparison of results must find what
such code does.
"""

from __future__ import annotations

import builtins
import hashlib
import inspect
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, ModuleType
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
    ),
)
_PACKAGE = "torch_cudal1."
# All modules of these packages; not torch.optim, whose classes Dynamo wraps.
_WATCHED_PACKAGES = (_PACKAGE, "torch.nn.utils.")
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
# Kept alive: a replacement could get the identity of an object that was freed.
_kept_alive: list[Any] = []
Table: TypeAlias = dict[str, dict[str, list[int]]]


def list_module_identities() -> dict[str, int]:
    """The identity of each loaded module, by name."""
    return {name: id(module) for name, module in list(sys.modules.items())}


def _iter_members(owner: Any) -> Iterator[tuple[str, Any]]:
    # vars, not getattr: no code of a lazy module or of a descriptor runs.
    for name, value in list(vars(owner).items()):
        if (
            callable(value)
            or isinstance(value, (property, staticmethod, classmethod, ModuleType))
            or inspect.isgetsetdescriptor(value)
        ):
            yield name, value


def _iter_owners() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if name in _WATCHED_MODULES or name.startswith(_WATCHED_PACKAGES):
            yield name, module
    for kind in (
        *_WATCHED_CLASSES,
        *_list_classes("torch.nn.modules"),
        *_list_classes("torch.cuda.streams"),
        *_list_classes(_PACKAGE + "judge"),
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
    - hiding: label -> names that are not members yet, and would hide an inherited one.
    - modules: names of the modules loaded now.
    """

    owners: list[tuple[str, Any]]
    names: dict[str, list[str]]
    hiding: dict[str, frozenset[str]]
    modules: list[str]


def _choose_watched() -> _Watched:
    owners = list(dict(_iter_owners()).items())
    _kept_alive.extend(value for _, owner in owners for _, value in _iter_members(owner))
    _kept_alive.extend(
        # A function keeps its identity when its __code__ is replaced, so that is read and kept too.
        value.__code__
        for value in list(_kept_alive)
        if isinstance(value, FunctionType)
    )
    return _Watched(
        owners,
        names={label: [name for name, _ in _iter_members(owner)] for label, owner in owners},
        hiding={label: _find_hidden_names(owner) - vars(owner).keys() for label, owner in owners},
        # Modules that are imported later are not watched: honest code imports too.
        modules=list(sys.modules),
    )


def _bind_readers(watched: _Watched) -> tuple[Callable[[], Table], Callable[[], dict[str, str]]]:
    """Two functions: one reads all identities, one their digests and that of the loaded modules.

    Digests are quicker to make, to send and to compare.
    """
    owners, names, hiding, loaded = watched.owners, watched.names, watched.hiding, watched.modules
    # Bound now, before any source is loaded: a name patched later is noticed, and not used.
    identity, kind_of, function, read = id, type, FunctionType, vars
    numbers, sha, module_table = array, hashlib.sha256, sys.modules

    def list_identities(value: Any) -> list[int]:
        # Replacing __code__ or the defaults changes a function, and not its identity.
        if kind_of(value) is not function:
            return [identity(value)]
        return [
            identity(value),
            identity(value.__code__),
            identity(value.__defaults__),
            identity(value.__kwdefaults__),
        ]

    def read_table() -> Table:
        table: Table = {}
        for label, owner in owners:
            members = read(owner)
            table[label] = {name: list_identities(members.get(name)) for name in names[label]}
            table[label] |= {
                f"+{name}": [identity(members[name])] for name in hiding[label] & members.keys()
            }
        return table

    def read_digests() -> dict[str, str]:
        flat: list[int] = []
        for label, owner in owners:
            members = read(owner)
            for name in names[label]:
                flat += list_identities(members.get(name))
            if not hiding[label].isdisjoint(members):
                flat += (identity(members[name]) for name in hiding[label] if name in members)
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
    """Owner -> name -> identity of the object; for a Python function also of its code and defaults.

    The first call of this function or of `digest_identities` fixes what is read. "+name" is a later
    member that hides one of a base class or a built-in.
    """
    return _get_readers()[0]()


def digest_identities() -> dict[str, str]:
    """The sha256 of all `read_identities`, and of the identities of the modules that were loaded at
    the first call.
    """
    return _get_readers()[1]()
