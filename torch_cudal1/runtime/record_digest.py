"""A digest of guard records that is the same in every process in which a call would find the same
state: what one process bound may serve another where the digests are equal.

Within a process the guard compares identities. Across processes there are none, so each object is
described by what it is: plain values by their text, functions by their code and closure, classes of
the program's own by their body, modules by name, tensors by their form, and everything else by its class and by where the records met it before
(`a is b` in one process must hold in the other). What an object contains is in records of its own.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import re
import sys
import types
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

import torch

from torch_cudal1.core.program_text import is_library_file
from torch_cudal1.runtime.guard_records import ABSENT, IGNORED, GuardRecords
from torch_cudal1.runtime.opaque_types import PLAIN_TYPES

__all__ = ["compute_record_digest"]

_PLAIN = (*PLAIN_TYPES, slice, range)
_BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)
# Immutable, with a text that says all.
_SPOKEN = (
    PurePath,
    re.Pattern,
    types.GenericAlias,
    type(NotImplemented),
    torch.finfo,
    torch.iinfo,
    torch.qscheme,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
# Names of a class body that say where it was written, not what it does; and transformers' hash of a
# generation config, which is another number in each process.
_IGNORED_NAMES = frozenset(
    {IGNORED, "__doc__", "__firstlineno__", "__static_attributes__", "_original_object_hash"}
)

# Variables that differ from start to start of one command.
_OF_THE_SHELL = frozenset({b"_", b"SHLVL", b"OLDPWD"})


def compute_record_digest(records: GuardRecords) -> str:
    """sha256 over the descriptions of all records, in their order."""
    writer = _DigestWriter()
    for match in records.type_matches:
        writer.write("type", match.where, match.target, match.kind)
    for owner in records.dict_identities:
        writer.write("attributes of", owner.where, owner.target)
    for table in records.dict_contents:
        writer.write_table(table.where, table.table, table.keys, table.values)
    for sequence in records.sequences:
        items: Any = sequence.items
        # A set of texts has another order in each process.
        if isinstance(sequence.target, (set, frozenset)):
            items = frozenset(items)
        writer.write("items", sequence.where, sequence.target, items)
    for content in records.byte_arrays:
        writer.write("bytes", content.where, content.content)
    for hooks in records.empty_hooks:
        writer.write("no hooks", hooks.where)
    for name in records.names:
        value = "absent" if name.value is ABSENT else name.value
        writer.write("name", name.where, name.key, name.value is ABSENT, value)
    for function in records.functions:
        writer.write(
            "function", function.where, function.function, function.code, function.defaults
        )
        writer.write("keyword defaults", tuple((function.kwdefaults or {}).items()))
    for cell in records.closure_cells:
        writer.write("closure", cell.where, cell.value)
    for tensor in records.tensors:
        writer.write("tensor", tensor.where, tensor.tensor, tensor.kind, tensor.facts)
    return writer.digest()


class _DigestWriter:
    """Writes descriptions into a hash. Objects are numbered in the order in which it meets them."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        # Held while their ids are keys, and described once.
        self._objects: list[Any] = []
        self._codes: dict[types.CodeType, str] = {}

    def digest(self) -> str:
        """The hash of all that was written."""
        return self._hash.hexdigest()

    def write(self, *values: Any) -> None:
        """One record."""
        for value in values:
            self._hash.update(self._describe(value).encode(errors="surrogatepass"))
            self._hash.update(b"\0")
        self._hash.update(b"\1")

    def write_table(
        self, where: str, table: Any, keys: Iterable[Any], values: Iterable[Any] | None
    ) -> None:
        """A record of a dictionary or of a class's body; without `values` what its keys hold now, in any
        order.
        """
        if values is None:
            # The environment. Dynamo guards no value that `os.getenv` reads.
            names = frozenset(keys) - _OF_THE_SHELL
            self.write("variables", where, frozenset((name, table.get(name)) for name in names))
            return
        pairs = [
            (key, value)
            for key, value in zip(keys, values, strict=True)
            if not (isinstance(key, str) and key in _IGNORED_NAMES)
        ]
        self.write("table", where, type(table).__name__, len(pairs))
        for key, value in pairs:
            self.write(key, value)

    def _describe(self, value: Any) -> str:
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, types.CodeType):
            return f"code {self._describe_code(value)}"
        if type(value) is tuple:
            return f"({', '.join(map(self._describe, value))})"
        if type(value) is frozenset:
            return f"{{{', '.join(sorted(map(self._describe, value)))}}}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        number = self._numbers.get(id(value))
        if number is not None:
            return f"object {number}"
        number = self._numbers[id(value)] = len(self._objects)
        self._objects.append(value)
        return f"object {number}: {self._describe_object(value)}"

    def _describe_object(self, value: Any) -> str:
        """An object that the records meet for the first time."""
        if isinstance(value, type):
            name = f"class {value.__module__}.{value.__qualname__}"
            return f"{name} {self._describe_body(value)}" if _may_vary(value.__module__) else name
        if isinstance(value, types.FunctionType):
            if getattr(value, "_dynamo_marked_constant", False):
                return f"constant {value.__module__}.{value.__qualname__} {_call_constant(value)!r}"
            parts = (
                value.__code__,
                value.__defaults__,
                tuple((value.__kwdefaults__ or {}).items()),
                tuple(map(_read_cell, value.__closure__ or ())),
            )
            return f"function {value.__module__}.{value.__qualname__} {self._describe(parts)}"
        if isinstance(value, _BUILTINS):
            name = getattr(value, "__qualname__", value.__name__)
            return f"{type(value).__name__} {getattr(value, '__module__', '')}.{name}"
        if isinstance(value, torch.Tensor):
            form = (value.dtype, tuple(value.shape), value.requires_grad, value.device)
            return f"{type(value).__qualname__} {self._describe(form)}"
        if isinstance(value, types.MethodType):
            return f"method {self._describe((value.__func__, value.__self__))}"
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__} of {self._describe(value.__func__)}"
        if type(value) is functools.partial:
            call = (value.func, value.args, tuple(value.keywords.items()))
            return f"partial {self._describe(call)}"
        if type(value) is functools.cached_property:
            return f"cached property {self._describe(value.func)}"
        if isinstance(value, property):
            return f"property {self._describe((value.fget, value.fset, value.fdel))}"
        if isinstance(value, enum.Enum):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            return f"enum {kind}.{value.name} {self._describe(value.value)}"
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, _SPOKEN):
            return f"{kind} {value!r}"
        # A wrapper of C, such as that of a cached function.
        inner = _read_attribute(value, "__wrapped__")
        return kind if inner is None else f"{kind} of {self._describe(inner)}"

    def _describe_body(self, kind: type) -> str:
        """What a class of the program's own has, and its bases: data may have made it."""
        members = [
            (name, member)
            for name, member in vars(kind).items()
            if name not in _IGNORED_NAMES and name not in ("__dict__", "__weakref__")
        ]
        return self._describe((kind.__bases__, tuple(members)))

    def _describe_code(self, code: types.CodeType) -> str:
        # By what it does: file names and line numbers may differ between machines.
        if code not in self._codes:
            parts = (
                code.co_code,
                code.co_names,
                code.co_varnames,
                code.co_freevars,
                code.co_cellvars,
                code.co_flags,
                code.co_argcount,
                code.co_posonlyargcount,
                code.co_kwonlyargcount,
                getattr(code, "co_exceptiontable", b""),
            )
            constants = "".join(map(self._describe, code.co_consts))
            text = f"{parts!r} {constants}"
            self._codes[code] = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        return self._codes[code]


def _call_constant(function: types.FunctionType) -> Any:
    """What a library's function returns, which Dynamo called in its place, such as whether another
    library is there. Raises ValueError for one whose result may be another in each process.
    """
    needed = function.__code__.co_argcount - len(function.__defaults__ or ())
    is_plain = not needed and not function.__code__.co_kwonlyargcount
    if is_plain and is_library_file(function.__code__.co_filename):
        result = function()
        if result is None or type(result) in (bool, int, str):
            return result
    raise ValueError(f"{function.__qualname__} is constant for one process alone")


def _read_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "empty"


def _may_vary(module: str) -> bool:
    """Whether a class of this module may be another one in another start, though no file changed: those
    of libraries are what their files say.
    """
    loaded = sys.modules.get(module)
    return not is_library_file(getattr(loaded, "__file__", None) or "")


def _read_attribute(value: Any, name: str) -> Any:
    """An attribute in the object's own dictionary; None without running any code of its class."""
    names = getattr(type(value), "__dict__", {}).get("__dict__")
    if not isinstance(names, types.GetSetDescriptorType):
        return None
    table = names.__get__(value)
    return table.get(name) if type(table) is dict else None
