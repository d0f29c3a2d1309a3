"""Divides Dynamo's guards of a captured call among those who check them: nobody twice, and all of
them in C++.

        Dynamo's guards ──> what the arguments' signature and the state of the process say already: dropped
                        ├─> what follows from the identity of a chain of things: records for our own guard, 5 ns each
                        └─> all else: kept in Dynamo's own tree

A guard reads its value by steps: a name of a Python module, an attribute, an item, a class, a
default argument. Where every step is one whose outcome a record can compare (the same object as
when the call was captured), the value is the same object, and a guard on something immutable holds.
What the walk over the module compares already needs no record. A step that is none of these proves
nothing, and its guard is kept.
"""

from __future__ import annotations

import builtins
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from packaging.version import Version

from torch_cudal1.core.settings import environment_table
from torch_cudal1.graph.dynamo import DynamoCapture, Entries
from torch_cudal1.runtime.guard_records import (
    ABSENT,
    HEAP_TYPE,
    Cell,
    Code,
    Home,
    Items,
    Kin,
    Lookup,
    Table,
    Watched,
)

__all__ = ["GuardSplit", "forgotten_classes"]

# Said by guard.call_state and guard.tracing_reason, or by the arguments' signature where shapes are
# static.
_STATE = frozenset(
    {
        "GRAD_MODE",
        "DETERMINISTIC_ALGORITHMS",
        "GLOBAL_STATE",
        "TORCH_FUNCTION_STATE",
        "DEFAULT_DEVICE",
        "SHAPE_ENV",
    }
    | {"AUTOGRAD_SAVED_TENSORS_HOOKS", "DUAL_LEVEL", "FUNCTORCH_STACK_MATCH"}
)
_OF_IDENTITY = frozenset(
    {
        "ID_MATCH",
        "CLASS_MATCH",
        "MODULE_MATCH",
        "FUNCTION_MATCH",
        "CLOSURE_MATCH",
        "BUILTIN_MATCH",
        "CONSTANT_MATCH",
        "EQUALS_MATCH",
    }
)
_OF_TYPE = frozenset({"TYPE_MATCH", "NN_MODULE"})
_OF_CONTENT = frozenset(
    {
        "DICT_CONTAINS",
        "DICT_NOT_CONTAINS",
        "DICT_KEYS_MATCH",
        "DICT_CONST_KEYS",
        "DICT_VERSION",
        "SEQUENCE_LENGTH",
        "LENGTH_CHECK",
    }
    | {"NOT_PRESENT_IN_GENERIC_DICT"}
)
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    types.CodeType,
    type(...),
)
_NAMED = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ModuleType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_ITEM_STEPS = ("GetItemSource", "DictGetItemSource", "ListGetItemSource")
_SUBCLASS_ITEM_STEPS = ("DictSubclassGetItemSource",)
_ATTRIBUTE_STEPS = (
    "AttrSource",
    "GenericAttrSource",
    "UnspecializedParamBufferSource",
    "ParamBufferSource",
    "CellContentsSource",
)
_TRANSPARENT_STEPS = (
    "UnspecializedNNModuleSource",
    "UnspecializedBuiltinNNModuleSource",
    "NNModuleSource",
    "SkipGuardSource",
)
_READ_ONLY = {  # attributes that cannot be assigned
    types.FunctionType: ("__closure__", "__globals__"),
    types.MethodType: ("__func__", "__self__"),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}
_MAX_ITEMS = 1024
_ENVIRONMENT = environment_table()
_INDUCTORS = b"_TORCHINDUCTOR_"  # variables that Inductor sets for itself while it compiles
_MOST_LEVELS = 16  # of containers, in a signature
_SLOTS = ("_parameters", "_buffers", "_modules")
# Dynamo before 2.13 reads an attribute of a class that a forward names, and does not look at it
# again.
_FORGETS_CLASSES = Version(torch.__version__).release < (2, 13)
_WITHOUT_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class _UnprovenError(Exception):
    """A step whose outcome no record compares."""


@dataclass(frozen=True)
class _Names:
    """The `__dict__` of a thing, read as such."""

    owner: Any


@dataclass
class GuardSplit:
    """`keep` is for `DynamoCapture.guards`; after it ran, `records()` is what our own guard has to
    compare.
    """

    capture: DynamoCapture
    watched: Watched
    kept: list[str] = field(default_factory=list)  # what stays with Dynamo, for reports
    _proven: dict[str, Any] = field(default_factory=dict)
    _known: set[Any] = field(default_factory=set)
    _new: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        w = self.watched
        self._known.update(("kin", id(record.thing)) for record in w.kins)
        self._known.update(("home", id(record.thing)) for record in w.homes)
        self._known.update(("table", id(record.owner or record.table)) for record in w.tables)
        self._known.update(("table", id(record.hooks)) for record in w.empties)
        self._known.update(("items", id(record.thing)) for record in w.items)
        self._known.update(("tensor", id(record.tensor)) for record in w.tensors)
        self._known.update(("cell", id(record.cell)) for record in w.cells)
        self._known.update(("lookup", id(record.table), record.key) for record in w.lookups)
        for unchanged in self.capture.unchanged:
            self._lookup(vars(unchanged.thing), unchanged.name, unchanged.value)

    def keep(self, entries: Entries) -> list[bool]:
        """For each guard whether Dynamo's tree goes on checking it."""
        found = [self._is_kept(entry) for entry in entries]
        self.kept = [
            f"{entry.guard_type} {entry.name}"
            for entry, kept in zip(entries, found, strict=True)
            if kept
        ]
        return found

    def records(self) -> Watched:
        """What the walk watches, and what came from Dynamo's guards."""
        known = {one.name: getattr(self.watched, one.name) for one in fields(Watched)}
        return replace(
            self.watched, **{name: (*known[name], *new) for name, new in self._new.items()}
        )

    def holds_identity(self, source: Any) -> bool:
        """Whether `source` reads the very same tensor for as long as the records hold."""
        try:
            return ("tensor", id(self._value(source))) in self._known
        except _UnprovenError:
            return False

    # --- guards

    def _is_kept(self, entry: Any) -> bool:
        if entry.guard_type in _STATE:
            return False
        source = entry.orig_guard.originating_source
        for named in forgotten_classes([entry]):
            self._content(named)
        if getattr(_root(source), "local_name", "") in ("args", "kwargs"):
            return not _is_in_signature(entry, source, self.capture.locals)
        # the records of steps that were proven stay where a later one is not: they serve other
        # guards too
        try:
            if entry.guard_type == "HASATTR":
                return not self._attributes(self._value(_owner(entry, source)))
            return not self._follows(entry, self._value(source))
        except (_UnprovenError, AttributeError, LookupError, TypeError):
            return True

    def _follows(self, entry: Any, value: Any) -> bool:
        """Whether the guard says nothing that the identity of its value does not. Notes what else
        must be compared.
        """
        kind = entry.guard_type
        if kind == "EMPTY_NN_MODULE_HOOKS_DICT":
            return (
                entry.name.endswith(_WITHOUT_HOOKS)
                or ("table", id(value)) in self._known
                or self._content(value)
            )
        if kind == "TENSOR_MATCH":
            return ("tensor", id(value)) in self._known
        if kind == "DUPLICATE_INPUT":  # raises where the other one of the two is not proven
            return self._value(entry.orig_guard.create_fn.keywords["source_b"]) is value
        if kind in _OF_CONTENT:
            names = isinstance(value, _Names)
            return self._content(
                value.owner if names else value, attributes=names or kind.startswith("NOT_PRESENT")
            )
        if kind in _OF_TYPE:
            return isinstance(value, _Names) or self._class(value)
        if kind not in _OF_IDENTITY or not _is_immutable(value):
            return False
        if isinstance(value, types.FunctionType):
            self._function(value)
        return True

    def _content(self, value: Any, *, attributes: bool = False) -> bool:
        """Compare what is in it: which names an object or a class has, the keys of a dict, the
        items of a list.
        """
        if isinstance(value, types.ModuleType):
            return False
        if isinstance(value, type):
            if not value.__flags__ & HEAP_TYPE:  # a class made in C: nobody can assign to it
                return True
            return self._note(
                "tables",
                ("table", id(value)),
                lambda: _table(f"class {value.__qualname__}", vars(value), value),
            )
        if type(value) is tuple:
            return True
        if (
            value is _ENVIRONMENT
        ):  # of the variables that a forward read the values have records of their own
            return self._note(
                "tables",
                ("names", id(value)),
                lambda: Table.of_names("the environment", "variable", value, but=_INDUCTORS),
            )
        if isinstance(value, dict) and dict.__len__(value) <= _MAX_ITEMS:
            return self._note("tables", ("table", id(value)), lambda: _table("a dict", value))
        if type(value) is list and len(value) <= _MAX_ITEMS:
            return self._note(
                "items", ("items", id(value)), lambda: Items("a list", value, tuple(value))
            )
        names = None if isinstance(value, threading.local) else getattr(value, "__dict__", None)
        if attributes and type(names) is dict and len(names) <= _MAX_ITEMS:
            self._home(value)
            return self._note(
                "tables", ("table", id(names)), lambda: _table(type(value).__name__, names)
            )
        return False

    def _attributes(self, value: Any) -> bool:
        """Compare which attributes it has: its own, and those of its classes."""
        if (
            isinstance(value, (types.ModuleType, torch.Tensor))
            or type(getattr(value, "__dict__", None)) is not dict
        ):
            return False
        self._class(value)
        bases = [base for base in type(value).__mro__[:-1] if not _is_torchs(base.__module__)]
        slots = [vars(value)[slot] for slot in _SLOTS] if isinstance(value, torch.nn.Module) else []
        return self._content(value, attributes=True) and all(map(self._content, (*bases, *slots)))

    # --- values

    def _value(self, source: Any) -> Any:
        """What `source` reads, once records say that it stays this. Raises _UnprovenError."""
        name = source.name
        if name not in self._proven:
            self._proven[name] = self._read(source)
        return self._proven[name]

    def _read(self, source: Any) -> Any:
        kind, base = type(source).__name__, getattr(source, "base", None)
        if base is None:
            return self._root_value(source)
        value = self._value(base)
        if kind in _TRANSPARENT_STEPS:
            return value
        if kind in _ATTRIBUTE_STEPS:
            return self._attribute(value, source.member)
        if kind == "TypeSource":
            self._class(value)
            return type(value)
        if kind == "TypeDictSource":
            return _Names(value)
        if kind == "TypeMROSource":
            return value.__mro__
        if kind == "ClosureSource":
            return value.__closure__
        if kind == "DefaultsSource":
            self._function(value)
            return (value.__kwdefaults__ if source.is_kw else value.__defaults__)[source.idx_key]
        if kind == "ConstDictKeySource":
            self._content(value)
            return list(dict.keys(value))[source.index]
        if kind in (*_ITEM_STEPS, *_SUBCLASS_ITEM_STEPS):
            return self._item(value, source.index)
        raise _UnprovenError(kind)

    def _root_value(self, source: Any) -> Any:
        if getattr(source, "local_name", "") == "module":
            return self.capture.locals["module"]
        name = getattr(source, "global_name", None)
        if name in self.capture.globals:  # names of the frame that was captured, which is our own
            value = self.capture.globals[name]
            return _Names(builtins) if str(name).startswith("__builtins_dict__") else value
        raise _UnprovenError(type(source).__name__)

    def _attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, types.CellType) and name == "cell_contents":
            self._note(
                "cells",
                ("cell", id(value)),
                lambda: Cell("a closure variable", value, value.cell_contents),
            )
            return value.cell_contents
        if isinstance(value, types.ModuleType):
            return self._lookup(vars(value), name, vars(value)[name])
        if name == "__class__":
            self._class(value)
            return type(value)
        if name == "__dict__":
            return _Names(value)
        if name in _READ_ONLY.get(type(value), ()):
            return getattr(value, name)
        if isinstance(value, types.FunctionType) and name in (
            "__code__",
            "__defaults__",
            "__kwdefaults__",
        ):
            self._function(value)
            return getattr(value, name)
        if isinstance(value, type):
            return self._class_attribute(value, name)
        names = getattr(value, "__dict__", None)
        if type(names) is not dict:
            raise _UnprovenError(name)
        self._class(value)
        self._home(value)
        if name in names:
            return self._lookup(names, name, names[name])
        for slot in _SLOTS:  # as nn.Module.__getattr__ finds them
            if isinstance(value, torch.nn.Module) and name in names[slot]:
                return self._lookup(self._lookup(names, slot, names[slot]), name, names[slot][name])
        self._lookup(names, name, ABSENT)
        found = self._class_attribute(type(value), name)
        if isinstance(found, types.FunctionType):
            self._function(found)
            return types.MethodType(found, value)
        if hasattr(type(found), "__get__"):  # a property: what it gives is the outcome of a call
            raise _UnprovenError(name)
        return found

    def _class_attribute(self, cls: type, name: str) -> Any:
        for base in cls.__mro__:
            if name in vars(base):
                return self._lookup(base, name, vars(base)[name])
            self._lookup(base, name, ABSENT)
        raise _UnprovenError(name)

    def _item(self, value: Any, index: Any) -> Any:
        if isinstance(value, _Names):
            owner = value.owner
            if owner is builtins:
                return vars(builtins)[index]
            if isinstance(owner, type):
                return self._lookup(owner, index, vars(owner)[index])
            self._home(owner)
            return self._lookup(vars(owner), index, vars(owner)[index])
        if isinstance(value, tuple):
            return tuple.__getitem__(value, index)
        if type(value) is list:
            self._content(value)
            return value[index]
        if hasattr(index, "base"):  # a key that is itself read from somewhere
            index = self._value(index)
        if isinstance(value, dict) and isinstance(index, (*_PLAIN, *_NAMED)):
            return self._lookup(value, index, dict.__getitem__(value, index))
        raise _UnprovenError("an item")

    # --- records

    def _note(self, kind: str, key: Any, record: Callable[[], Any]) -> bool:
        if key not in self._known:
            self._known.add(key)
            self._new.setdefault(kind, []).append(record())
        return True

    def _lookup(self, table: Any, key: Any, value: Any) -> Any:
        """A name in a dict or in the body of a class. Names of torch itself are not looked after:
        they are not the user's to change.
        """
        if (
            isinstance(table, type) and not table.__flags__ & HEAP_TYPE
        ):  # a class made in C: nobody can assign to it
            return value
        named = (
            table.__module__
            if isinstance(table, type)
            else table.get("__name__", "")
            if type(table) is dict
            else ""
        )
        if not _is_torchs(str(named)) and ("table", id(table)) not in self._known:
            where = (
                f"{table.__qualname__}.{key}"
                if isinstance(table, type)
                else f"{named or 'a dict'}.{key}"
            )
            self._note(
                "lookups", ("lookup", id(table), key), lambda: Lookup(where, table, key, value)
            )
        return value

    def _class(self, value: Any) -> bool:
        if (
            type(type(value)) is not type or type(value).__flags__ & HEAP_TYPE
        ):  # of any other, the class cannot be assigned
            self._note(
                "kins", ("kin", id(value)), lambda: Kin(type(value).__name__, value, type(value))
            )
        return True

    def _home(self, value: Any) -> None:
        if isinstance(value, threading.local):  # has another dictionary in another thread
            raise _UnprovenError("an object of one thread")
        self._note(
            "homes", ("home", id(value)), lambda: Home(type(value).__name__, value, vars(value))
        )

    def _function(self, function: types.FunctionType) -> None:
        if not _is_torchs(function.__module__ or ""):
            self._note(
                "codes",
                ("function", id(function)),
                lambda: Code.of(f"function {function.__qualname__}", function),
            )
            if function.__kwdefaults__:
                self._content(function.__kwdefaults__)


def forgotten_classes(entries: Entries) -> list[type]:
    """The classes that a frame names whose bodies Dynamo does not look at again, those that they
    inherit from included.
    """
    if not _FORGETS_CLASSES:
        return []
    named = [entry.value for entry in entries if entry.has_value and isinstance(entry.value, type)]
    return [base for each in named if not _is_torchs(each.__module__) for base in each.__mro__[:-1]]


def _table(where: str, table: Any, owner: type | None = None) -> Table:
    pairs = tuple(dict.items(table)) if isinstance(table, dict) else tuple(table.items())
    return Table(
        where,
        "class attribute" if owner else "item",
        table,
        tuple(key for key, _ in pairs),
        tuple(value for _, value in pairs),
        False,
        owner,
    )


def _is_immutable(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, *_NAMED)) or (
        type(value) in (tuple, frozenset) and all(map(_is_immutable, value))
    )


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins")


def _owner(entry: Any, source: Any) -> Any:
    """The source of the thing that a guard on the presence of an attribute asks: PyTorch before
    2.13 names the attribute itself.
    """
    return source if "attr" in getattr(entry.orig_guard.create_fn, "keywords", {}) else source.base


def _is_in_signature(entry: Any, source: Any, locals_: Mapping[str, Any]) -> bool:
    """Whether it says no more than the arguments' signature (`guard.signature`): of plain
    containers, plain values and dense tensors in them. Of anything else among the arguments that
    says the class alone.
    """
    value: Any = locals_[_root(source).local_name]
    steps = list(_steps(source))
    if len(steps) > _MOST_LEVELS:
        return False
    for step in reversed(steps):
        if type(step).__name__ not in _ITEM_STEPS or not _is_described(value):
            return False
        try:
            value = value[step.index]
        except (LookupError, TypeError):
            return False
    if entry.guard_type == "TENSOR_MATCH":
        return type(value) in (torch.Tensor, torch.nn.Parameter)
    return bool(entry.has_value) and _is_described(value)


def _is_described(value: Any) -> bool:
    """Whether a signature tells this plain value, or this container apart from what is in it, from
    any other.
    """
    kind = type(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**63)
    if kind is dict:
        return all(type(key) is str for key in value)
    return kind in (
        bool,
        str,
        float,
        type(None),
        torch.dtype,
        torch.device,
        tuple,
        list,
        torch.Size,
    )


def _steps(source: Any) -> Iterator[Any]:
    """The sources from the last step to the first; the root is not among them."""
    while (base := getattr(source, "base", None)) is not None:
        yield source
        source = base


def _root(source: Any) -> Any:
    while (base := getattr(source, "base", None)) is not None:
        source = base
    return source
