"""The child's side of `env_diff`, part one: which objects stand behind the names of torch, Python
and the judge's own worker.

Everything that is read is taken hold of when this module is imported, before any source is loaded,
so that a name patched later is seen and not used. The objects themselves are kept alive: an
identity that is free again could be given to an impostor. It compares nothing; numbers go to the
parent, or a digest of them, which is enough while all is as it was. Code in the same process can
still write into these closures (through `gc`, frames or ctypes) or put everything back before each
look: what such code does to results is for the parent's own comparisons to find.
"""

from __future__ import annotations

import builtins
import hashlib
import inspect
import sys
from array import array
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
import torch.testing

__all__ = ["digests", "identities", "modules"]

_WATCHED = (
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
_OWN = "torch_cudal1."
_HARMLESS = frozenset(
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
_CLASSES = (
    torch.Tensor,
    torch._C.TensorBase,
    torch.nn.Parameter,
    torch.Generator,
    torch.UntypedStorage,
)
_kept: list[Any] = []
Table: TypeAlias = dict[str, dict[str, list[int]]]


def modules() -> dict[str, int]:
    """Which object is which module, by name."""
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
        if name in _WATCHED or name.startswith(_OWN):
            yield name, module
    for kind in (
        *_CLASSES,
        *_classes_of("torch.nn.modules"),
        *_classes_of("torch.cuda.streams"),
        *_classes_of(_OWN + "judge"),
    ):
        yield f"{kind.__module__}.{kind.__qualname__}", kind


def _classes_of(prefix: str) -> list[type]:
    found = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith(prefix)
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith(prefix)
    }
    return sorted(found, key=lambda kind: (kind.__module__, kind.__qualname__))


def _hidden_by(owner: Any) -> frozenset[str]:
    """Names that a new member of `owner` would hide: of the classes it derives from, of Python's
    built-ins for a module.
    """
    bases = owner.__mro__[1:] if isinstance(owner, type) else [builtins]
    return frozenset(name for base in bases for name in vars(base) if name not in _HARMLESS)


def _looker() -> tuple[Callable[[], Table], Callable[[], dict[str, str]]]:
    """Two functions that look at the owners and modules there are now, with built-ins taken hold of
    now: all identities, and digests of them and of the modules', which are quicker made, sent and
    compared.
    """
    owners = list(dict(_owners()).items())
    _kept.extend(value for _, owner in owners for _, value in _members(owner))
    _kept.extend(value.__code__ for value in list(_kept) if isinstance(value, FunctionType))
    identity, kind_of, function, read, numbers, sha = (
        id,
        type,
        FunctionType,
        vars,
        array,
        hashlib.sha256,
    )
    names = {label: [name for name, _ in _members(owner)] for label, owner in owners}
    hiding = {
        label: _hidden_by(owner) - vars(owner).keys() for label, owner in owners
    }  # no member has such a name now
    loaded, table_of_modules = list(sys.modules), sys.modules

    def numbers_of(value: Any) -> list[int]:
        if kind_of(value) is not function:
            return [identity(value)]
        return [
            identity(value),
            identity(value.__code__),
            identity(value.__defaults__),
            identity(value.__kwdefaults__),
        ]

    def look() -> Table:
        seen: Table = {}
        for label, owner in owners:
            held = read(owner)
            seen[label] = {name: numbers_of(held.get(name)) for name in names[label]}
            seen[label] |= {
                f"+{name}": [identity(held[name])] for name in hiding[label] & held.keys()
            }
        return seen

    def glance() -> dict[str, str]:
        found: list[int] = []
        for label, owner in owners:
            held = read(owner)
            for name in names[label]:
                found += numbers_of(held.get(name))
            if not hiding[label].isdisjoint(held):
                found += (identity(held[name]) for name in hiding[label] if name in held)
        of_modules = [identity(table_of_modules.get(name)) for name in loaded]
        return {
            "identities": sha(numbers("Q", found)).hexdigest(),
            "modules": sha(numbers("Q", of_modules)).hexdigest(),
        }

    return look, glance


_looks: list[tuple[Callable[[], Table], Callable[[], dict[str, str]]]] = []


def _fixed() -> tuple[Callable[[], Table], Callable[[], dict[str, str]]]:
    if not _looks:
        _looks.append(_looker())
    return _looks[0]


def identities() -> Table:
    """Owner -> name -> identity of the object, and for a Python function of its code and defaults.

    The first call of this or of `digests` fixes what is looked at; "+name" is a name that came
    later and hides one of a base class or of Python's own.
    """
    return _fixed()[0]()


def digests() -> dict[str, str]:
    """Of all `identities`, and of which object is which module among those that were there at the
    first call.
    """
    return _fixed()[1]()
