"""Reads the value behind a source of Dynamo's guards, step by step.

A guard reads its value by steps: a name of a Python module, an attribute, an item, a class, a
default argument. For every step a record is collected that compares its outcome with the object at
the capture; a step that no record can compare raises UnprovenError.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torch_cudal1.graph.dynamo_effects import Unchanged
from torch_cudal1.graph.dynamo_guard_records import MODULE_SLOTS, RecordCollector, UnprovenError
from torch_cudal1.graph.traced_code import CodeKey
from torch_cudal1.runtime.guard_records import ABSENT
from torch_cudal1.runtime.opaque_types import PLAIN_TYPES

__all__ = [
    "ITEM_STEPS",
    "NAMED",
    "AttributeDict",
    "GuardedFrame",
    "SourceReader",
    "find_root_source",
    "find_source_kind",
    "steps_of",
]

# objects of which a name is part, which a guard may compare by identity as well
NAMED = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ModuleType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
# By class name: a source that is not listed raises UnprovenError, which keeps Dynamo's guard.
ITEM_STEPS = ("GetItemSource", "DictGetItemSource", "ListGetItemSource")
# Apart from ITEM_STEPS: a signature describes plain dicts only.
_SUBCLASS_ITEM_STEPS = ("DictSubclassGetItemSource",)
_ATTRIBUTE_STEPS = (
    "AttrSource",
    "GenericAttrSource",
    "UnspecializedParamBufferSource",
    "ParamBufferSource",
    "CellContentsSource",
)
# They mark how Dynamo treats a value, and read nothing themselves.
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


class GuardedFrame(Protocol):
    """The frame whose guards are read: a capture of Dynamo's, or what stands for it."""

    @property
    def locals(self) -> Mapping[str, Any]:
        """{module, args, kwargs}."""

    @property
    def globals(self) -> Mapping[str, Any]:
        """What sources name besides."""

    @property
    def unchanged(self) -> Sequence[Unchanged]:
        """Assignments of a value that is there already."""

    @property
    def traced_code(self) -> Mapping[CodeKey, types.CodeType | None]:
        """The code that Dynamo traced, without torch's own; None where only its key is known."""


@dataclass(frozen=True)
class AttributeDict:
    """The `__dict__` of `owner`, read as such."""

    owner: Any


class SourceReader:
    """Reads sources of `capture`; `collector` gets a record of every step."""

    def __init__(self, capture: GuardedFrame, collector: RecordCollector) -> None:
        self._capture, self._collector = capture, collector
        # Many guards share the first steps of a source, such as `self.layers[0]`.
        self._values: dict[str, Any] = {}

    def read(self, source: Any) -> Any:
        """What `source` reads, once records say that it stays this. Raises UnprovenError."""
        name = source.name
        if name not in self._values:
            # Only after its records exist: a step that raises must raise again for the next guard.
            self._values[name] = self._read_step(source)
        return self._values[name]

    def _read_step(self, source: Any) -> Any:
        kind, base = find_source_kind(source), getattr(source, "base", None)
        if base is None:
            return self._read_root(source)
        value = self.read(base)
        if kind in _TRANSPARENT_STEPS:
            return value
        if kind in _ATTRIBUTE_STEPS:
            return self._read_attribute(value, source.member)
        if kind == "TypeSource":
            self._collector.add_class(value)
            return type(value)
        if kind == "TypeDictSource":
            return AttributeDict(value)
        if kind == "TypeMROSource":
            return value.__mro__
        if kind == "ClosureSource":
            return value.__closure__
        if kind == "DefaultsSource":
            self._collector.add_function(value)
            return (value.__kwdefaults__ if source.is_kw else value.__defaults__)[source.idx_key]
        if kind == "ConstDictKeySource":
            self._collector.add_content(value)
            return list(dict.keys(value))[source.index]
        if kind in (*ITEM_STEPS, *_SUBCLASS_ITEM_STEPS):
            return self._read_item(value, source.index)
        raise UnprovenError(kind)

    def _read_root(self, source: Any) -> Any:
        # The module is held by the guard itself. Arguments differ from call to call, so nothing
        # about them can be read at the capture.
        if getattr(source, "local_name", "") == "module":
            return self._capture.locals["module"]
        name = str(getattr(source, "global_name", ""))
        if name in self._capture.globals:  # of the captured frame, `dynamo._call`
            value = self._capture.globals[name]
            # Dynamo puts the dict of the builtins among the globals, under a name of its own.
            return AttributeDict(builtins) if name.startswith("__builtins_dict__") else value
        raise UnprovenError(type(source).__name__)

    def _read_attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, types.CellType) and name == "cell_contents":
            self._collector.add_cell(value)
            return value.cell_contents
        if isinstance(value, types.ModuleType):
            # From the dict, since a module may define `__getattr__`, whose outcome no record
            # compares.
            return self._collector.add_lookup(vars(value), name, vars(value)[name])
        if name == "__class__":
            self._collector.add_class(value)
            return type(value)
        if name == "__dict__":
            return AttributeDict(value)
        # Needs no record: Python refuses an assignment.
        if name in _READ_ONLY.get(type(value), ()):
            return getattr(value, name)
        if isinstance(value, types.FunctionType) and name in (
            "__code__",
            "__defaults__",
            "__kwdefaults__",
        ):
            self._collector.add_function(value)
            return getattr(value, name)
        if isinstance(value, type):
            return self._read_class_attribute(value, name)
        return self._read_object_attribute(value, name)

    def _read_object_attribute(self, value: Any, name: str) -> Any:
        names = getattr(value, "__dict__", None)
        # Slots and C objects keep their attributes where no record looks.
        if type(names) is not dict:
            raise UnprovenError(name)
        self._collector.add_class(value)
        # `obj.__dict__ = {...}` would leave the recorded dict as it was, and unread.
        self._collector.add_attribute_dict(value)
        if name in names:
            return self._collector.add_lookup(names, name, names[name])
        for slot in MODULE_SLOTS:  # as nn.Module.__getattr__ finds them
            if isinstance(value, torch.nn.Module) and name in names[slot]:
                return self._collector.add_lookup(
                    self._collector.add_lookup(names, slot, names[slot]), name, names[slot][name]
                )
        # The class's attribute counts only while the instance has none of that name.
        self._collector.add_lookup(names, name, ABSENT)
        attribute = self._read_class_attribute(type(value), name)
        if isinstance(attribute, types.FunctionType):
            # A method is bound anew at each access: its function is what can be compared.
            self._collector.add_function(attribute)
            return types.MethodType(attribute, value)
        if hasattr(type(attribute), "__get__"):  # a property: its value is the outcome of a call
            raise UnprovenError(name)
        return attribute

    def _read_class_attribute(self, cls: type, name: str) -> Any:
        for base in cls.__mro__:
            if name in vars(base):
                return self._collector.add_lookup(base, name, vars(base)[name])
            # An attribute that a class earlier in the MRO gets later would come first.
            self._collector.add_lookup(base, name, ABSENT)
        raise UnprovenError(name)

    def _read_item(self, value: Any, index: Any) -> Any:
        if isinstance(value, AttributeDict):
            owner = value.owner
            # Names of builtins are not recorded, as those of torch are not.
            if owner is builtins:
                return vars(builtins)[index]
            if isinstance(owner, type):
                return self._collector.add_lookup(owner, index, vars(owner)[index])
            self._collector.add_attribute_dict(owner)
            return self._collector.add_lookup(vars(owner), index, vars(owner)[index])
        if isinstance(value, tuple):
            # A tuple is immutable, so the item is the same for as long as the tuple is. A
            # NamedTuple may override `__getitem__`.
            return tuple.__getitem__(value, index)
        if type(value) is list:
            # The whole list: an insertion moves every item after it.
            self._collector.add_content(value)
            return value[index]
        if hasattr(index, "base"):  # a key that is itself read from somewhere
            index = self.read(index)
        # A key of another class may define `__eq__` and `__hash__`, which a look-up would run.
        if isinstance(value, dict) and isinstance(index, (*PLAIN_TYPES, *NAMED)):
            return self._collector.add_lookup(value, index, dict.__getitem__(value, index))
        raise UnprovenError("an item")


def find_source_kind(source: Any) -> str:
    """The name of the class of a source of Dynamo's, or of what stands for it (`stored_guards`)."""
    return str(getattr(source, "stored_kind", "") or type(source).__name__)


def steps_of(source: Any) -> Iterator[Any]:
    """The sources from the last step to the first, without the root."""
    while (base := getattr(source, "base", None)) is not None:
        yield source
        source = base


def find_root_source(source: Any) -> Any:
    """The source of the first step: a local or a global name."""
    while (base := getattr(source, "base", None)) is not None:
        source = base
    return source
