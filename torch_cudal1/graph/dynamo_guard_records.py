"""Collects the records that a compiled guard compares for Dynamo's guards.

A record says that an object is what it was when the call was captured: a name under which it is
found, its class, its attribute dictionary, a function's code, what a container holds. What the walk
over the module recorded already is not recorded twice. Code of torch's own functions is not
recorded: it is not the user's to change.
"""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from torch_cudal1.core.settings import INDUCTOR_PREFIX, environment_table
from torch_cudal1.runtime.guard_records import (
    HEAP_TYPE,
    ClosureMatch,
    DictContents,
    DictIdentity,
    FunctionMatch,
    GuardRecords,
    NameMatch,
    SequenceContents,
    TypeMatch,
    is_definition,
)

__all__ = ["IN_TORCH", "MODULE_SLOTS", "RecordCollector", "UnprovenError", "is_torch_module"]

Record = TypeVar("Record")

MODULE_SLOTS = ("_parameters", "_buffers", "_modules")
# A call may have to compare every item, so a longer container keeps Dynamo's own guard.
_MAX_ITEMS = 1024
_ENVIRONMENT = environment_table()
# the folder of torch's own files
IN_TORCH = f"{os.path.dirname(torch.__file__)}{os.sep}"


class UnprovenError(Exception):
    """A step of a guard's source whose outcome no record compares."""


class RecordCollector:
    """Collects records for Dynamo's guards beside the records of a walk over the module."""

    def __init__(self, walked: GuardRecords) -> None:
        self.walked = walked
        # Keys are ids. They stay unique because the records hold the objects that they name.
        self._keys: set[Any] = set()
        self._type_matches: list[TypeMatch] = []
        self._dict_identities: list[DictIdentity] = []
        self._dict_contents: list[DictContents] = []
        self._sequence_contents: list[SequenceContents] = []
        self._name_matches: list[NameMatch] = []
        self._function_matches: list[FunctionMatch] = []
        self._closure_matches: list[ClosureMatch] = []
        # What the walk compares already must not be compared a second time on every call.
        self._keys.update(("type", id(record.target)) for record in walked.type_matches)
        self._keys.update(("dict identity", id(record.target)) for record in walked.dict_identities)
        self._keys.update(
            # A class is found by its own id: `vars(cls)` makes a new mappingproxy at each access.
            ("table", id(record.owner or record.table))
            for record in walked.dict_contents
        )
        self._keys.update(("table", id(record.hooks)) for record in walked.empty_hooks)
        self._keys.update(("items", id(record.target)) for record in walked.sequences)
        self._keys.update(("tensor", id(record.tensor)) for record in walked.tensors)
        self._keys.update(("function", id(record.function)) for record in walked.functions)
        self._keys.update(("cell", id(record.cell)) for record in walked.closure_cells)
        self._keys.update(("name", id(record.table), record.key) for record in walked.names)

    def merge(self) -> GuardRecords:
        """The records of the walk and the added ones."""
        walked = self.walked
        return replace(
            walked,
            type_matches=(*walked.type_matches, *self._type_matches),
            dict_identities=(*walked.dict_identities, *self._dict_identities),
            dict_contents=(*walked.dict_contents, *self._dict_contents),
            sequences=(*walked.sequences, *self._sequence_contents),
            names=(*walked.names, *self._name_matches),
            functions=(*walked.functions, *self._function_matches),
            closure_cells=(*walked.closure_cells, *self._closure_matches),
        )

    @property
    def count(self) -> int:
        """How many things records compare."""
        return len(self._keys)

    def has_tensor(self, value: Any) -> bool:
        """Whether a record compares this very tensor."""
        return ("tensor", id(value)) in self._keys

    def has_table(self, value: Any) -> bool:
        """Whether a record compares what is in this dictionary or class."""
        return ("table", id(value)) in self._keys

    def _add(self, records: list[Record], key: Any, make: Callable[[], Record]) -> bool:
        if key not in self._keys:
            self._keys.add(key)
            records.append(make())
        return True

    def add_content(self, value: Any, *, attributes: bool = False) -> bool:
        """Compare what `value` contains: the names of a class, the keys of a dict, the items of a
        list; with `attributes` the names of any object. False where no record can.
        """
        # Importing a submodule adds a name to its package, which would fail the record though
        # nothing that the forward reads has changed.
        if isinstance(value, types.ModuleType):
            return False
        if isinstance(value, type):
            # From Python 3.12 on a class made in C has no tp_dict, and reading it crashed.
            if not value.__flags__ & HEAP_TYPE:  # a class made in C: it cannot be assigned to
                return True
            return self._add(
                self._dict_contents,
                ("table", id(value)),
                lambda: _record_table(f"class {value.__qualname__}", vars(value), value),
            )
        if type(value) is tuple:
            return True
        # Without the names that Inductor sets: with them every Llama of transformers was bound anew
        # until it was given up.
        if value is _ENVIRONMENT:
            # the values of the variables that a forward read have records of their own
            return self._add(
                self._dict_contents,
                ("names", id(value)),
                lambda: DictContents.of_names(
                    "the environment", "variable", value, ignored_prefix=INDUCTOR_PREFIX
                ),
            )
        # `dict.__len__`, because a subclass may run the user's code in its own `__len__`.
        if isinstance(value, dict) and dict.__len__(value) <= _MAX_ITEMS:
            return self._add(
                self._dict_contents, ("table", id(value)), lambda: _record_table("a dict", value)
            )
        # The exact type: a subclass of list may return other items than it stores.
        if type(value) is list and len(value) <= _MAX_ITEMS:
            return self._add(
                self._sequence_contents,
                ("items", id(value)),
                lambda: SequenceContents("a list", value, tuple(value)),
            )
        # A threading.local has another `__dict__` in each thread: a record of this thread's would
        # prove nothing for a call from another one.
        names = None if isinstance(value, threading.local) else getattr(value, "__dict__", None)
        if attributes and type(names) is dict and len(names) <= _MAX_ITEMS:
            self.add_attribute_dict(value)
            return self._add(
                self._dict_contents,
                ("table", id(names)),
                lambda: _record_table(type(value).__name__, names),
            )
        return False

    def add_definitions(self, cls: type) -> None:
        """Compare the methods, properties and classes in the body of a class, and its bases; its data
        are compared where they are read.
        """
        if cls.__flags__ & HEAP_TYPE and not self.has_table(cls):
            self._add(
                self._dict_contents, ("definitions", id(cls)), lambda: _record_definitions(cls)
            )

    def add_attributes(self, value: Any) -> bool:
        """Compare which attributes `value` and its classes have. False where no record can."""
        if (
            isinstance(value, (types.ModuleType, torch.Tensor))
            or type(getattr(value, "__dict__", None)) is not dict
        ):
            return False
        self.add_class(value)
        # Without `object`, which is last in the MRO and cannot be assigned to.
        bases = [base for base in type(value).__mro__[:-1] if not is_torch_module(base.__module__)]
        is_module = isinstance(value, torch.nn.Module)
        # `nn.Module.__getattr__` looks into these dicts after the instance's own.
        slots = [vars(value)[slot] for slot in MODULE_SLOTS] if is_module else []
        return self.add_content(value, attributes=True) and all(
            map(self.add_content, (*bases, *slots))
        )

    def add_lookup(self, table: Any, key: Any, value: Any) -> Any:
        """Compare what a name in a dict or in the body of a class stands for; returns `value`."""
        if isinstance(table, type):
            if not table.__flags__ & HEAP_TYPE:  # a class made in C: it cannot be assigned to
                return value
            where = f"{table.__qualname__}.{key}"
        else:
            module = table.get("__name__") if type(table) is dict else None
            where = f"{module or 'a dict'}.{key}"
        # A record of the whole table covers each name in it.
        if not self.has_table(table):
            self._add(
                self._name_matches,
                ("name", id(table), key),
                lambda: NameMatch(where, table, key, value),
            )
        return value

    def add_class(self, value: Any) -> bool:
        """Compare the class of an object, where it can be assigned; returns True."""
        # `__class__` can be assigned only where the class is a heap type. A metaclass may define
        # its own rules, so such an object is compared too.
        if type(type(value)) is not type or type(value).__flags__ & HEAP_TYPE:
            self._add(
                self._type_matches,
                ("type", id(value)),
                lambda: TypeMatch(type(value).__name__, value, type(value)),
            )
        return True

    def add_attribute_dict(self, value: Any) -> None:
        """Compare which dictionary holds the attributes of an object."""
        if isinstance(value, threading.local):  # has another dictionary in another thread
            raise UnprovenError("an object of one thread")
        self._add(
            self._dict_identities,
            ("dict identity", id(value)),
            lambda: DictIdentity(type(value).__name__, value, vars(value)),
        )

    def add_function(self, function: types.FunctionType) -> None:
        """Compare the code and the default arguments of a function."""
        # By its file: `functools.wraps` hands on the name of another module.
        if not function.__code__.co_filename.startswith(IN_TORCH):
            self._add(
                self._function_matches,
                ("function", id(function)),
                lambda: FunctionMatch.of(f"function {function.__qualname__}", function),
            )
            # FunctionMatch compares which dict holds the keyword defaults. Its items can be written
            # in place.
            if function.__kwdefaults__:
                self.add_content(function.__kwdefaults__)

    def add_cell(self, cell: types.CellType) -> None:
        """Compare what a closure variable holds."""
        self._add(
            self._closure_matches,
            ("cell", id(cell)),
            lambda: ClosureMatch("a closure variable", cell, cell.cell_contents),
        )


def _record_table(where: str, table: Any, owner: type | None = None) -> DictContents:
    # `dict.items` instead of the subclass's own, which may be the user's code.
    pairs = tuple(dict.items(table)) if isinstance(table, dict) else tuple(table.items())
    return DictContents(
        where,
        "class attribute" if owner else "item",
        table,
        tuple(key for key, _ in pairs),
        tuple(value for _, value in pairs),
        False,
        owner,
        mro=owner.__mro__ if owner else None,
    )


def _record_definitions(cls: type) -> DictContents:
    pairs = [(key, value) for key, value in vars(cls).items() if is_definition(value)]
    return DictContents(
        f"class {cls.__qualname__}",
        "class attribute",
        vars(cls),
        tuple(key for key, _ in pairs),
        tuple(value for _, value in pairs),
        owner=cls,
        mro=cls.__mro__,
        definitions_only=True,
    )


def is_torch_module(module: str) -> bool:
    """Whether a module of that name is torch's or the interpreter's own."""
    return module.partition(".")[0] in ("torch", "builtins")
