"""Which objects stand behind the names of torch, Python and the judge's own modules in this process.

Everything that is read is bound when this module is imported, before any source is loaded, so a
name patched later is seen and not used. The parent compares the identities, or digests of them,
with those of before the candidate came. Code in the same process can still write into these
closures (through `gc`, frames or ctypes) or put everything back before each read: what such code
does to results is for the parent's comparisons to find.
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

__all__ = ["digest_identities", "module_identities", "read_identities"]

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
    ),
)
_PACKAGE = "torch_cudal1."
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
# kept alive: an identity that is free again could be given to a replacement
_kept_alive: list[Any] = []
Table: TypeAlias = dict[str, dict[str, list[int]]]


def module_identities() -> dict[str, int]:
    """The identity of each loaded module, by name."""
    return {name: id(module) for name, module in list(sys.modules.items())}


def _members(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(owner).items()):
        if (
            callable(value)
            or isinstance(value, (property, staticmethod, classmethod, ModuleType))
            or inspect.isgetsetdescriptor(value)
        ):
            yield name, value


def _owners() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if name in _WATCHED_MODULES or name.startswith(_PACKAGE):
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


def _hidden_names(owner: Any) -> frozenset[str]:
    """Names that a new member of `owner` would hide: of the classes it derives from, of Python's
    built-ins for a module.
    """
    bases = owner.__mro__[1:] if isinstance(owner, type) else [builtins]
    return frozenset(name for base in bases for name in vars(base) if name not in _IGNORED_NAMES)


@dataclass(frozen=True)
class _Watched:
    """Owners by label, the names that are read of each, those that nothing of it has now though a
    new member could hide an inherited one, and the modules that are loaded.
    """

    owners: list[tuple[str, Any]]
    names: dict[str, list[str]]
    hiding: dict[str, frozenset[str]]
    modules: list[str]


def _choose_watched() -> _Watched:
    owners = list(dict(_owners()).items())
    _kept_alive.extend(value for _, owner in owners for _, value in _members(owner))
    _kept_alive.extend(
        value.__code__ for value in list(_kept_alive) if isinstance(value, FunctionType)
    )
    return _Watched(
        owners,
        names={label: [name for name, _ in _members(owner)] for label, owner in owners},
        hiding={label: _hidden_names(owner) - vars(owner).keys() for label, owner in owners},
        modules=list(sys.modules),
    )


def _bind_readers(watched: _Watched) -> tuple[Callable[[], Table], Callable[[], dict[str, str]]]:
    """Functions that read all identities, and digests of them and of the modules', which are quicker
    to make, send and compare. Built-ins are bound now.
    """
    owners, names, hiding, loaded = watched.owners, watched.names, watched.hiding, watched.modules
    identity, kind_of, function, read = id, type, FunctionType, vars
    numbers, sha, module_table = array, hashlib.sha256, sys.modules

    def numbers_of(value: Any) -> list[int]:
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
            table[label] = {name: numbers_of(members.get(name)) for name in names[label]}
            table[label] |= {
                f"+{name}": [identity(members[name])] for name in hiding[label] & members.keys()
            }
        return table

    def read_digests() -> dict[str, str]:
        flat: list[int] = []
        for label, owner in owners:
            members = read(owner)
            for name in names[label]:
                flat += numbers_of(members.get(name))
            if not hiding[label].isdisjoint(members):
                flat += (identity(members[name]) for name in hiding[label] if name in members)
        of_modules = [identity(module_table.get(name)) for name in loaded]
        return {
            "identities": sha(numbers("Q", flat)).hexdigest(),
            "modules": sha(numbers("Q", of_modules)).hexdigest(),
        }

    return read_table, read_digests


_readers: list[tuple[Callable[[], Table], Callable[[], dict[str, str]]]] = []


def _first_readers() -> tuple[Callable[[], Table], Callable[[], dict[str, str]]]:
    if not _readers:
        _readers.append(_bind_readers(_choose_watched()))
    return _readers[0]


def read_identities() -> Table:
    """Owner -> name -> identity of the object, and for a Python function of its code and defaults.

    The first call of this or of `digest_identities` fixes what is read; "+name" is a name that came
    later and hides one of a base class or of Python's own.
    """
    return _first_readers()[0]()


def digest_identities() -> dict[str, str]:
    """Digests of all `read_identities`, and of the identities of the modules that were loaded at
    the first call.
    """
    return _first_readers()[1]()
