"""Walks a module once and records everything that a call of it may depend on: the records of a
guard.

State that cannot be watched makes the answer a `Refusal` with the reason. Besides the state of the
modules the walk follows plain containers and objects behind attributes, class bodies, and the code
and global names that `forward` uses. So a guard sees a patched class, a notebook cell that was run
again, and a global flag that was flipped.

It compares nothing, and does not watch: values and versions of tensors (programs read weights
live), the state of C++ objects, code in other files than the class, and objects behind global names
and closures beyond small containers.
"""

from __future__ import annotations

import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torch_cudal1.core.code_names import read_code_names
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.runtime.guard_records import (
    HEAP_TYPE,
    IGNORED,
    BytesMatch,
    ClosureMatch,
    DictContents,
    DictIdentity,
    EmptyHooks,
    FunctionMatch,
    GuardRecords,
    NameMatch,
    SequenceContents,
    TensorMatch,
    TypeMatch,
    read_tensor_facts,
)
from torch_cudal1.runtime.opaque_types import OPAQUE_TYPES

__all__ = ["record_module"]

_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
# What is in these says how a hook is called; without the hook it does nothing.
_HOOK_FLAGS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
)
_SLOTS = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
# The identity of these is watched with the other attributes. Their content plays no part in a call,
# or has a record of its own.
_BOOKKEEPING = {
    *_HOOKS,
    *_HOOK_FLAGS,
    *_SLOTS,
    IGNORED,
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}
# Nesting of attributes, items of one container, containers and objects. A guard compares everything
# that it recorded at every call, so a larger state is refused.
_MAX_DEPTH, _MAX_ITEMS, _MAX_TOTAL = (8, 1024, 16384)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque, set)


def record_module(module: nn.Module) -> GuardRecords | Refusal:
    """Walk `module` and record its state. A Refusal if it has hooks, scripted parts, tensor
    subclasses or state that can change without a trace in Python.
    """
    walk = _Walk()
    try:
        walk.record_global_hooks()
        walk.visit_module(module, "")
    except _UnwatchableError as refused:
        return Refusal(str(refused))
    return GuardRecords(
        **{name: tuple(getattr(walk, name)) for name in GuardRecords.__dataclass_fields__}
    )


class _UnwatchableError(Exception):
    """Ends the walk; becomes a Refusal."""


@dataclass
class _Walk:
    type_matches: list[TypeMatch] = field(default_factory=list)
    dict_identities: list[DictIdentity] = field(default_factory=list)
    dict_contents: list[DictContents] = field(default_factory=list)
    sequences: list[SequenceContents] = field(default_factory=list)
    byte_arrays: list[BytesMatch] = field(default_factory=list)
    empty_hooks: list[EmptyHooks] = field(default_factory=list)
    names: list[NameMatch] = field(default_factory=list)
    functions: list[FunctionMatch] = field(default_factory=list)
    closure_cells: list[ClosureMatch] = field(default_factory=list)
    tensors: list[TensorMatch] = field(default_factory=list)
    visited: dict[object, object] = field(default_factory=dict)
    total: int = 0

    def _visit_first_time(self, value: object, role: object = "") -> bool:
        """Whether the walk meets `value` for the first time in this role."""
        key = (id(value), role)
        if key in self.visited:
            return False
        # Held, so that its id() is not given to another object during the walk.
        self.visited[key] = value
        return True

    def record_global_hooks(self) -> None:
        table = vars(torch_module)
        for name in _GLOBAL_HOOKS:
            where, hooks = f"torch.nn.modules.module.{name}", table[name]
            # A hook runs inside nn.Module.__call__, which a bound call does not go through.
            if hooks:
                raise _UnwatchableError(
                    f"{where} is not empty: hooks for every module are registered"
                )
            # By name too: a tool may put another dictionary in the place of this one.
            self.names.append(NameMatch(where, table, name, hooks))
            self.empty_hooks.append(EmptyHooks(where, hooks))

    # --- modules and tensors

    def visit_module(self, module: nn.Module, path: str) -> None:
        if not self._visit_first_time(module):
            return
        if isinstance(module, torch.jit.ScriptModule):
            raise _UnwatchableError(
                f"{path or 'the module'} is a torch.jit.ScriptModule: its state is not in Python"
            )
        # Slots are not in __dict__, and a change of one leaves no trace that a guard compares.
        if _has_slots(type(module)):
            raise _UnwatchableError(
                f"{path or 'the module'} is a {type(module).__qualname__}, which keeps state outside __dict__"
            )
        attributes = vars(module)
        for name in _HOOKS:
            hooks = attributes.get(name)
            if hooks:
                raise _UnwatchableError(
                    f"{_join(path, name)}: hooks are registered; they run only through a plain module call"
                )
            if hooks is not None:
                self.empty_hooks.append(EmptyHooks(_join(path, name), hooks))
        self._record_object(module, path, attributes)
        for slot, kind in _SLOTS.items():
            self._record_table(path, kind, attributes[slot])
        for slot in ("_parameters", "_buffers"):
            for name, tensor in attributes[slot].items():
                if tensor is not None:
                    self._record_tensor(f"{_SLOTS[slot]} {_join(path, name)}", tensor)
        # Modules in plain lists and dicts are found here: they are in no `_modules`.
        for name, value in list(attributes.items()):
            if name not in _BOOKKEEPING:
                self._follow_value(_join(path, name), value, 1)
        self._record_class(type(module))
        for name, child in attributes["_modules"].items():
            if child is not None:
                self.visit_module(child, _join(path, name))

    def _record_tensor(self, where: str, tensor: torch.Tensor) -> None:
        if not self._visit_first_time(tensor):
            return
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise _UnwatchableError(f"{where} is not initialised yet: call the module once before")
        # The exact types: a subclass may compute anything in __torch_function__ or
        # __torch_dispatch__.
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            raise _UnwatchableError(
                f"{where} is a {type(tensor).__name__}: a tensor subclass has behaviour of its own"
            )
        # Programs address memory by strides, which such tensors do not have.
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise _UnwatchableError(
                f"{where} is not a dense strided tensor (layout {tensor.layout})"
            )
        self.tensors.append(TensorMatch(where, tensor, type(tensor), read_tensor_facts(tensor)))

    def _record_object(self, value: object, path: str, attributes: dict[str, Any]) -> None:
        self.type_matches.append(TypeMatch(path, value, type(value)))
        self.dict_identities.append(DictIdentity(path, value, attributes))
        self._record_table(
            path, "attribute", attributes, skips_ignored=isinstance(value, nn.Module)
        )

    def _record_table(
        self,
        where: str,
        kind: str,
        table: Mapping[Any, Any],
        *,
        skips_ignored: bool = False,
        owner: type | None = None,
    ) -> None:
        pairs = [
            (key, value) for key, value in table.items() if not (skips_ignored and key == IGNORED)
        ]
        keys, values = tuple(key for key, _ in pairs), tuple(value for _, value in pairs)
        self.dict_contents.append(
            DictContents(
                where,
                kind,
                table,
                keys,
                values,
                skips_ignored,
                owner,
                mro=owner.__mro__ if owner else None,
            )
        )

    # --- values behind attributes

    def _follow_value(self, where: str, value: Any, depth: int) -> None:
        """Follow an attribute, or a value inside one, as far as it can change in place."""
        if isinstance(value, OPAQUE_TYPES):
            return
        if isinstance(value, torch.Tensor):
            self._record_tensor(f"tensor {where}", value)
        elif isinstance(value, nn.Module):
            self.visit_module(value, where)
        # A function stored as an attribute, such as an activation: reloading tools replace its code
        # in place.
        elif isinstance(value, types.FunctionType):
            self._record_code(where, value, None)
        elif self._visit_first_time(value):
            # A cycle of objects ends at `_visit_first_time`; a chain or tree without end would not.
            self.total += 1
            if depth > _MAX_DEPTH or self.total > _MAX_TOTAL:
                raise _UnwatchableError(
                    f"{where}: attributes nest deeper than {_MAX_DEPTH} or hold over {_MAX_TOTAL} containers"
                )
            for name, part in self._record_parts(where, value):
                self._follow_value(name, part, depth + 1)

    def _record_parts(self, where: str, value: Any) -> Iterable[tuple[str, object]]:
        """Record what can change in `value` itself; returns the values to follow from there, by
        name.
        """
        # A bound method is made anew at each look-up, so its identity says nothing; what it is made
        # of does.
        if isinstance(value, types.MethodType):
            return [(where, value.__func__), (f"{where}.__self__", value.__self__)]
        if type(value) is functools.partial:
            return [
                (where, value.func),
                (f"{where}.args", value.args),
                (f"{where}.keywords", value.keywords),
            ]
        if isinstance(value, (*_DICTS, *_SEQUENCES, tuple, frozenset, bytearray)):
            return self._record_container(where, value)
        # A class may hide its dictionary behind a property that gives another one each time.
        attributes = getattr(value, "__dict__", None)
        if (
            not isinstance(attributes, dict)
            or attributes is not value.__dict__
            or _has_slots(type(value))
        ):
            raise _UnwatchableError(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which can change unseen"
            )
        if len(attributes) > _MAX_ITEMS:
            raise _UnwatchableError(
                f"{where} has {len(attributes)} attributes; at most {_MAX_ITEMS} are watched"
            )
        self._record_object(value, where, attributes)
        return [(_join(where, name), part) for name, part in attributes.items()]

    def _record_container(self, where: str, value: Any) -> Iterable[tuple[str, object]]:
        if len(value) > _MAX_ITEMS:
            raise _UnwatchableError(
                f"{where} is a {type(value).__name__} of {len(value)} items; at most {_MAX_ITEMS} are watched"
            )
        # A tuple or frozenset cannot change, but what it holds can, so its items are followed all
        # the same.
        if not isinstance(value, (tuple, frozenset)) and not self._record_content(where, value):
            raise _UnwatchableError(
                f"{where} is a {type(value).__qualname__}: a subclass of a container can change unseen"
            )
        if isinstance(value, bytearray):
            return []
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [(f"{where}[{key!r}]", item) for key, item in pairs]

    def _record_content(self, where: str, value: Any) -> bool:
        """Record the content of a mutable container. False if it is of none of the plain types."""
        if type(value) in _DICTS:
            self._record_table(where, "item", value)
        elif type(value) in _SEQUENCES:
            self.sequences.append(SequenceContents(where, value, tuple(value)))
        elif type(value) is bytearray:
            self.byte_arrays.append(BytesMatch(where, value, bytes(value)))
        else:
            return False
        return True

    # --- classes and code

    def _record_class(self, cls: type) -> None:
        """Record the bodies of a module class and its bases, and the code that its `forward`
        reaches.
        """
        # Without `object`, whose body Python code cannot change.
        for base in cls.__mro__[:-1]:
            if self._visit_first_time(base):
                self._record_table(
                    f"class {base.__qualname__}", "class attribute", vars(base), owner=base
                )
                for name, value in vars(base).items():
                    if not name.startswith("__"):
                        self._record_small_container(f"class {base.__qualname__}.{name}", value)
        if self._visit_first_time(cls, "forward"):
            # All three run at a plain call of the module. nn.Module's own are PyTorch's code and
            # are not followed.
            for name in ("forward", "__call__", "__getattr__"):
                function = _unwrap_function(getattr_static(cls, name, None))
                if name == "forward" or function is not _unwrap_function(
                    getattr_static(nn.Module, name)
                ):
                    self._record_code(f"{cls.__qualname__}.{name}", function, cls)

    def _record_small_container(self, where: str, value: object) -> None:
        """Record the content of a small container. Behind class bodies, global names and closures
        nothing else is followed: it would lead through the whole program.
        """
        if (
            isinstance(value, (*_DICTS, *_SEQUENCES, bytearray))
            and len(value) <= _MAX_ITEMS
            and self._visit_first_time(value)
        ):
            self._record_content(where, value)

    def _record_code(
        self, where: str, function: types.FunctionType | None, cls: type | None
    ) -> None:
        """Record a function, and follow its names: methods of `cls`, globals, functions of the same
        file, and `module.name` pairs.
        """
        # Once for each class: the names in an inherited function lead to other methods in a
        # subclass.
        if function is None or not self._visit_first_time(function, cls):
            return
        if self._visit_first_time(function, "code"):
            self.functions.append(FunctionMatch.of(where, function))
            # Keyword defaults are a dictionary, which can be written in place.
            if function.__kwdefaults__:
                self._record_small_container(f"{where}, keyword defaults", function.__kwdefaults__)
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            ):
                self._record_cell(f"{where}, closure variable {name}", cell, cls)
        code_names = read_code_names(function.__code__)
        names = code_names.names
        for name in sorted(names):
            # A loop variable of a script is no global of a forward that reads an attribute `step`.
            if name in code_names.globals_:
                self._record_global(function.__globals__, name, names, cls)
            method = _unwrap_function(getattr_static(cls, name, None)) if cls is not None else None
            if method is not None and cls is not None:
                self._record_code(f"{cls.__qualname__}.{name}", method, cls)

    def _record_cell(self, where: str, cell: types.CellType, cls: type | None) -> None:
        try:
            value = cell.cell_contents
        except ValueError:
            # Still empty: no call can have read it.
            return
        self.closure_cells.append(ClosureMatch(where, cell, value))
        self._record_small_container(where, value)
        # In a decorator's wrapper the decorated function is a closure variable.
        if isinstance(value, types.FunctionType):
            self._record_code(where, value, cls)

    def _record_global(
        self, table: dict[str, Any], name: str, names: frozenset[str], cls: type | None
    ) -> None:
        if name not in table or not self._visit_first_time(table, name):
            return
        value = table[name]
        self.names.append(
            NameMatch(f"global {table.get('__name__', '?')}.{name}", table, name, value)
        )
        self._record_small_container(f"global {name}", value)
        if isinstance(value, types.FunctionType):
            same_file = value.__globals__ is table
            # Code of other files is left alone: it would lead through whole libraries.
            self._record_code(f"function {name}", value if same_file else None, None)
        elif isinstance(value, types.ModuleType):
            self._record_module_names(name, value, names)

    def _record_module_names(
        self, where: str, module: types.ModuleType, names: frozenset[str]
    ) -> None:
        """Record what code looks up in modules at every call: for `nn.functional.relu` that is
        `functional` in `nn`, and `relu` in that.
        """
        table = vars(module)
        # Bytecode holds names without saying what they are looked up in, so every name that the
        # module has is recorded.
        for name in sorted(names & table.keys()):
            if self._visit_first_time(table, name):
                value = table[name]
                self.names.append(NameMatch(f"{where}.{name}", table, name, value))
                if isinstance(value, types.ModuleType):
                    self._record_module_names(f"{where}.{name}", value, names)


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _has_slots(cls: type) -> bool:
    """Whether instances keep state in `__slots__` or in the C part of a built-in base. Neither is
    watched.
    """
    # A built-in base, such as a list or dict, keeps its state in C.
    foreign = any(not base.__flags__ & HEAP_TYPE for base in cls.__mro__[:-1])
    return foreign or any(
        isinstance(value, types.MemberDescriptorType)
        for base in cls.__mro__
        for value in vars(base).values()
    )


def _unwrap_function(attribute: object) -> types.FunctionType | None:
    attribute = (
        attribute.fget
        if isinstance(attribute, property)
        else getattr(attribute, "__func__", attribute)
    )
    return attribute if isinstance(attribute, types.FunctionType) else None
