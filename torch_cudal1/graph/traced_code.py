"""Records how the Python code that Dynamo traced finds what it uses.

Dynamo guards the values that a forward reads, but not each step by which Python finds them: the
methods of a helper object's class, the class whose method is called, a name of the builtins, an
attribute that a Python module does not have yet. torch.compile answers with the old code where one
of these changes. Here the traced functions are visited, and what their names lead to is recorded.

Code of torch and of Python itself is not followed: what it looks up is not the user's to change.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import operator
import os
import sys
import types
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import torch
from packaging.version import Version

from torch_cudal1.core.code_names import CodeNames, iter_code, read_code_names
from torch_cudal1.core.program_text import is_library_file, is_standard_file
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.dynamo_guard_records import IN_TORCH, RecordCollector
from torch_cudal1.runtime.guard_records import ABSENT, HEAP_TYPE, GuardRecords
from torch_cudal1.runtime.opaque_types import PLAIN_TYPES

__all__ = [
    "CodeKey",
    "CodeVisitor",
    "describe_code",
    "find_compiler_question",
    "find_uncompared_read",
    "list_own_code",
]

CodeKey: TypeAlias = tuple[str, str, int]  # file, qualified name, first line
_NOT_OWN = (IN_TORCH, f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}")
_ASKS_FOR_NAMES = frozenset({"hasattr", "getattr"})
# Of a tensor: whether it is a view. In a signature it would make each part of a batch a form of its
# own, for what next to nobody asks.
_NOT_COMPARED = frozenset({"_base"})
_COMPILER_QUESTIONS = frozenset({"is_compiling", "is_dynamo_compiling"})
_BUILTINS = vars(builtins)
# What code calls of a tensor without a name: infix operators, indexing, `if tensor`.
_OPERATORS = frozenset(dir(operator)) | {"__bool__", "__float__", "__int__", "__iter__", "__len__"}
# Dynamo before 2.13 reads an attribute of a class that a forward names, and never looks again.
_FORGETS_CLASSES = Version(torch.__version__).release < (2, 13)


def describe_code(code: types.CodeType) -> CodeKey:
    """What names the code in every process that has loaded the same file."""
    return (code.co_filename, code.co_qualname, code.co_firstlineno)


def list_own_code(codes: Collection[types.CodeType]) -> dict[CodeKey, types.CodeType]:
    """The codes that are neither torch's nor Python's nor this package's."""
    return {
        describe_code(code): code
        for code in codes
        if not (code.co_filename.startswith(_NOT_OWN) or is_standard_file(code.co_filename))
    }


def find_uncompared_read(codes: Collection[types.CodeType]) -> Refusal | None:
    """A Refusal names what the code reads of tensors that neither Dynamo nor a signature compares."""
    for code in codes:
        names = read_code_names(code)
        for name in sorted(_NOT_COMPARED & (names.names | names.texts)):
            return Refusal(f"{code.co_qualname} reads `{name}`, which no guard compares")
    return None


def find_compiler_question(codes: Collection[types.CodeType]) -> Refusal | None:
    """A Refusal names code of the user's that asks whether it is compiled: it may compute something
    else then. Libraries ask in order to compute the same.
    """
    for code in codes:
        if not is_library_file(code.co_filename):
            for name in sorted(_COMPILER_QUESTIONS & read_code_names(code).names):
                return Refusal(f"{code.co_qualname} asks `{name}`, and may do something else then")
    return None


class CodeVisitor:
    """Adds to `collector` what the functions whose code is among `keys` look up, starting from
    what `visit` is given.
    """

    def __init__(self, keys: Collection[CodeKey], collector: RecordCollector) -> None:
        self._keys, self._collector = frozenset(keys), collector
        self._reached: set[CodeKey] = set()
        # Held, so that an id is not given to another object meanwhile.
        self._visited: dict[int, object] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._classes: set[tuple[type, bool]] = set()
        self._tensor_names = frozenset(dir(torch.Tensor))

    def visit_walk(self, walked: GuardRecords) -> None:
        """Visit what a walk over the module met."""
        for match in walked.type_matches:
            self.visit(match.kind)
        for function in walked.functions:
            self.visit(function.function)
        for name in walked.names:
            self.visit(name.value)
        for cell in walked.closure_cells:
            self.visit(cell.value)

    def visit(self, value: Any) -> None:
        """Record what a call of `value`, of its class or of its methods looks up."""
        # The names of a Python module are recorded where code reads them.
        if isinstance(value, types.ModuleType) or id(value) in self._visited:
            return
        self._visited[id(value)] = value
        function = _unwrap(value)
        if function is not None:
            self._visit_function(function)
        if isinstance(value, types.MethodType):
            self.visit(value.__self__)
        if isinstance(value, type):
            self._visit_class(value, is_named=True)
        else:
            self._visit_class(type(value))

    def visit_remaining(self, codes: Mapping[CodeKey, types.CodeType]) -> list[CodeKey]:
        """Record what the traced code looks up that no visit has reached, such as a function that
        an argument brings; returns its keys.
        """
        remaining = [key for key in codes if key in self._keys and key not in self._reached]
        for key in remaining:
            if key not in self._reached:
                self._mark_reached(codes[key])
                table = _find_globals(codes[key])
                if table is not None:
                    self._record_names(codes[key], table)
        return remaining

    def _visit_class(self, cls: type, *, is_named: bool = False) -> None:
        if (cls, is_named) in self._classes:
            return
        self._classes.add((cls, is_named))
        # Without `object`, whose body Python code cannot change.
        for base in cls.__mro__[:-1]:
            if base.__flags__ & HEAP_TYPE and not _is_fixed_class(base):
                if _FORGETS_CLASSES and is_named:
                    self._collector.add_content(base)
                else:
                    self._collector.add_definitions(base)
                for member in list(vars(base).values()):
                    function = _unwrap(member)
                    if function is not None:
                        self._visit_function(function)
        if type(cls) is not type:
            self.visit(type(cls))

    def _visit_function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if describe_code(code) not in self._keys or id(function) in self._functions:
            return
        self._functions[id(function)] = function
        self._mark_reached(code)
        self._collector.add_function(function)
        for cell in function.__closure__ or ():
            self._visit_cell(cell, code)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default)
        self._record_names(code, function.__globals__)

    def _mark_reached(self, code: types.CodeType) -> None:
        # A function that another one makes is new in each call.
        self._reached.update(map(describe_code, iter_code(code)))

    def _visit_cell(self, cell: types.CellType, code: types.CodeType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # still empty: no call can have read it
            return
        if isinstance(value, (type, types.FunctionType, types.ModuleType)):
            self._collector.add_cell(cell)
        if isinstance(value, types.ModuleType):
            self._record_module(value, read_code_names(code), set())
        self.visit(value)

    def _record_names(self, code: types.CodeType, table: dict[str, Any]) -> None:
        names = read_code_names(code)
        module_ids: set[int] = set()
        for name in sorted(names.globals_):
            if name in table:
                self._record_name(table, name, names, module_ids)
            elif name in _BUILTINS:
                # A name of the file's own would come first.
                self._collector.add_lookup(table, name, ABSENT)
                self._collector.add_lookup(_BUILTINS, name, _BUILTINS[name])
        for level, name in sorted(names.imports):
            module_name = _resolve_import(level, name, table)
            module = sys.modules.get(module_name)
            if isinstance(module, types.ModuleType):
                self._collector.add_lookup(sys.modules, module_name, module)
                self._record_module(module, names, module_ids)
        for name in sorted((names.names | _OPERATORS) & self._tensor_names):
            method = vars(torch.Tensor).get(name, ABSENT)
            self._collector.add_lookup(torch.Tensor, name, method)

    def _record_name(
        self, table: dict[str, Any], name: str, names: CodeNames, module_ids: set[int]
    ) -> None:
        value = table[name]
        # Dynamo guards these where they are read.
        if isinstance(value, PLAIN_TYPES):
            return
        self._collector.add_lookup(table, name, value)
        if isinstance(value, types.ModuleType):
            self._record_module(value, names, module_ids)
        else:
            self.visit(value)

    def _record_module(
        self, module: types.ModuleType, names: CodeNames, module_ids: set[int]
    ) -> None:
        """For `nn.functional.relu` that is `functional` in `nn`, and `relu` in that: bytecode does
        not say what a name is looked up in, so every name that the module has is recorded.
        """
        if id(module) in module_ids:
            return
        module_ids.add(id(module))
        table = vars(module)
        for name in sorted(names.names & table.keys()):
            self._record_name(table, name, names, module_ids)
        if names.names & _ASKS_FOR_NAMES:
            for name in sorted(names.texts):
                self._collector.add_lookup(table, name, table.get(name, ABSENT))


def _resolve_import(level: int, name: str, table: dict[str, Any]) -> str:
    package = str(table.get("__package__") or "")
    try:
        return importlib.util.resolve_name("." * level + name, package) if level else name
    except ImportError:
        return name


def _find_globals(code: types.CodeType) -> dict[str, Any] | None:
    """The names of the Python module in whose file the code is."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == code.co_filename:
            return vars(module)
    return None


def _is_fixed_class(cls: type) -> bool:
    """Whether a class is torch's, Python's or this package's own."""
    root = cls.__module__.partition(".")[0]
    if root not in ("torch", "torch_cudal1") and root not in sys.stdlib_module_names:
        return False
    # `make_dataclass` and `exec` give names of their own modules to classes of the user's.
    place: Any = sys.modules.get(cls.__module__)
    if isinstance(place, types.ModuleType) and is_standard_file(
        getattr(place, "__file__", None) or "<frozen "
    ) is (root in sys.stdlib_module_names):
        for part in cls.__qualname__.split("."):
            place = getattr(place, part, None)
        return place is cls
    return False


def _unwrap(value: Any) -> types.FunctionType | None:
    """The Python function that is called where `value` is called or read from an object."""
    for _ in range(8):
        if isinstance(value, types.FunctionType):
            return value
        if isinstance(value, (types.MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif type(value) in (functools.partial, functools.partialmethod, functools.cached_property):
            value = value.func
        elif type(value) is functools._lru_cache_wrapper:
            value = value.__wrapped__
        else:
            return None
    return None
