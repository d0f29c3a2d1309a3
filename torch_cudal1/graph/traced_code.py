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
import os
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from torch_cudal1.core.program_text import is_standard_file
from torch_cudal1.graph.dynamo_guard_records import RecordCollector, is_torch_module
from torch_cudal1.runtime.guard_records import ABSENT, HEAP_TYPE, GuardRecords

__all__ = ["CodeKey", "CodeVisitor", "describe_code", "list_own_code", "list_read_names"]

CodeKey: TypeAlias = tuple[str, str, int]  # file, qualified name, first line
_IN_TORCH = (
    f"{os.path.dirname(torch.__file__)}{os.sep}",
    f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}",
)
# Dynamo guards each of these where it is read.
_GUARDED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ASKS_FOR_NAMES = frozenset({"hasattr", "getattr"})
_BUILTINS = vars(builtins)
_TENSOR_NAMES = frozenset(dir(torch.Tensor))
# What code calls without a name: infix operators, indexing, `if tensor`.
_COMPARISONS = {f"__{word}__" for word in ("eq", "ne", "lt", "le", "gt", "ge")}
_OPERATORS = _COMPARISONS | {*dir(int), *dir(list)} - {*dir(object)}
_TENSOR_OPERATORS = sorted(name for name in _TENSOR_NAMES & _OPERATORS if name.startswith("__"))
_STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)


def describe_code(code: types.CodeType) -> CodeKey:
    """What names the code in every process that has loaded the same file."""
    return (code.co_filename, code.co_qualname, code.co_firstlineno)


def list_own_code(codes: Collection[types.CodeType]) -> dict[CodeKey, types.CodeType]:
    """The codes that are neither torch's nor Python's nor this package's."""
    return {
        describe_code(code): code
        for code in codes
        if not (code.co_filename.startswith(_IN_TORCH) or is_standard_file(code.co_filename))
    }


def list_read_names(code: types.CodeType) -> frozenset[str]:
    """All names in the code and in the functions that it makes."""
    return frozenset(
        name for part in _iter_code(code) for name in (*part.co_names, *part.co_freevars)
    )


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
        self._visit_class(value if isinstance(value, type) else type(value))

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

    def _visit_class(self, cls: type) -> None:
        # Without `object`, whose body Python code cannot change.
        for base in cls.__mro__[:-1]:
            if base.__flags__ & HEAP_TYPE and not _is_fixed_module(base.__module__):
                self._collector.add_content(base)
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
            self._visit_cell(cell)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default)
        self._record_names(code, function.__globals__)

    def _mark_reached(self, code: types.CodeType) -> None:
        # A function that another one makes is new in each call.
        self._reached.update(map(describe_code, _iter_code(code)))

    def _visit_cell(self, cell: types.CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # still empty: no call can have read it
            return
        if isinstance(value, (type, types.FunctionType)):
            self._collector.add_cell(cell)
        self.visit(value)

    def _record_names(self, code: types.CodeType, table: dict[str, Any]) -> None:
        names = list_read_names(code)
        asked_names = _list_asked_names(code) if names & _ASKS_FOR_NAMES else frozenset()
        module_ids: set[int] = set()
        for name in sorted(names):
            if name in table:
                self._record_name(table, name, names, asked_names, module_ids)
            elif name in _BUILTINS:
                # A name of the file's own would come first.
                self._collector.add_lookup(table, name, ABSENT, of_torch=True)
                self._collector.add_lookup(_BUILTINS, name, _BUILTINS[name], of_torch=True)
            # `import` within a function.
            elif isinstance(module := sys.modules.get(name), types.ModuleType):
                self._collector.add_lookup(sys.modules, name, module)
                self._record_module(module, names, asked_names, module_ids)
        for name in (*sorted(names & _TENSOR_NAMES), *_TENSOR_OPERATORS):
            method = vars(torch.Tensor).get(name, ABSENT)
            self._collector.add_lookup(torch.Tensor, name, method, of_torch=True)

    def _record_name(
        self,
        table: dict[str, Any],
        name: str,
        names: frozenset[str],
        asked_names: frozenset[str],
        module_ids: set[int],
    ) -> None:
        value = table[name]
        if isinstance(value, _GUARDED):
            return
        self._collector.add_lookup(table, name, value, of_torch=True)
        if isinstance(value, types.ModuleType):
            self._record_module(value, names, asked_names, module_ids)
        else:
            self.visit(value)

    def _record_module(
        self,
        module: types.ModuleType,
        names: frozenset[str],
        asked_names: frozenset[str],
        module_ids: set[int],
    ) -> None:
        """For `nn.functional.relu` that is `functional` in `nn`, and `relu` in that: bytecode does
        not say what a name is looked up in, so every name that the module has is recorded.
        """
        if id(module) in module_ids:
            return
        module_ids.add(id(module))
        table = vars(module)
        for name in sorted(names & table.keys()):
            self._record_name(table, name, names, asked_names, module_ids)
        for name in sorted(asked_names):
            self._collector.add_lookup(table, name, table.get(name, ABSENT), of_torch=True)


def _iter_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _iter_code(constant)


def _list_asked_names(code: types.CodeType) -> frozenset[str]:
    """The texts in the code that can be the name of an attribute."""
    return frozenset(
        constant
        for part in _iter_code(code)
        for constant in part.co_consts
        if isinstance(constant, str) and constant.isidentifier()
    )


def _find_globals(code: types.CodeType) -> dict[str, Any] | None:
    """The names of the Python module in whose file the code is."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == code.co_filename:
            return vars(module)
    return None


def _is_fixed_module(name: str) -> bool:
    root = name.partition(".")[0]
    return is_torch_module(name) or root in _STANDARD_LIBRARY or root == "torch_cudal1"


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
