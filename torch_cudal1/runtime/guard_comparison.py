"""Compares the records of a guard with the present in plain Python, and words what differs.

It is the reference for csrc/guard.cpp, which has to give the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

from torch_cudal1.runtime.guard_records import (
    ABSENT,
    FACTS,
    IGNORED,
    DictContents,
    FunctionMatch,
    GuardRecords,
    NameMatch,
    TensorMatch,
    filter_names,
    is_definition,
    read_tensor_facts,
)

__all__ = ["PythonGuard", "iter_differences"]


class PythonGuard:
    """The reference implementation: every record is compared by identity, tensors by their facts."""

    def __init__(self, watched: GuardRecords) -> None:
        self._watched = watched
        self._hooks = [record.hooks for record in watched.empty_hooks]

    def holds(self) -> bool:
        w = self._watched
        # By identity everywhere: == could run the user's code, and compares tensors element by
        # element. Only a bytearray is compared by content, since its items are no objects.
        return (
            not any(self._hooks)
            and all(type(r.target) is r.kind for r in w.type_matches)
            and all(getattr(r.target, "__dict__", None) is r.table for r in w.dict_identities)
            and all(map(_same_table, w.dict_contents))
            and all(
                len(r.target) == len(r.items) and all(map(is_, r.target, r.items))
                for r in w.sequences
            )
            and all(r.target == r.content for r in w.byte_arrays)
            and all(map(_same_lookup, w.names))
            and all(map(_same_code, w.functions))
            and all(_read_cell(r.cell) is r.value for r in w.closure_cells)
            and all(map(_same_tensor, w.tensors))
        )


def _same_lookup(record: NameMatch) -> bool:
    # A mappingproxy of a class is made anew at each vars(), so the record holds the class.
    table: Any = vars(record.table) if isinstance(record.table, type) else record.table
    return table.get(record.key, ABSENT) is record.value


def _same_code(record: FunctionMatch) -> bool:
    function = record.function
    same_defaults = (
        function.__defaults__ is record.defaults and function.__kwdefaults__ is record.kwdefaults
    )
    return function.__code__ is record.code and same_defaults


def _same_table(record: DictContents) -> bool:
    table = record.table
    if record.owner is not None and record.owner.__mro__ is not record.mro:
        return False
    if record.values is None:
        return set(filter_names(table, record.ignored_prefix)) == set(record.keys)
    # The callable that accelerate() swapped in is no change of the module.
    if record.skips_ignored and IGNORED in table:
        table = {key: value for key, value in table.items() if key != IGNORED}
    if record.definitions_only:
        table = {key: value for key, value in table.items() if is_definition(value)}
    # In order: nn.Sequential runs its submodules in the order of this dictionary.
    return (
        len(table) == len(record.keys)
        and all(map(is_, table.values(), record.values))
        and all(map(is_, table, record.keys))
    )


def _same_tensor(record: TensorMatch) -> bool:
    return type(record.tensor) is record.kind and read_tensor_facts(record.tensor) == record.facts


def _read_cell(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        # `del` has emptied it since.
        return ABSENT


def iter_differences(w: GuardRecords) -> Iterator[str]:
    """Every difference in words, in the order of the records."""
    for hooks in w.empty_hooks:
        if hooks.hooks:
            yield f"{hooks.where}: hooks were registered"
    for match in w.type_matches:
        if type(match.target) is not match.kind:
            before, now = match.kind.__qualname__, type(match.target).__qualname__
            yield f"{match.where or 'the module'}: class {before} -> {now}"
    for identity in w.dict_identities:
        if identity.target.__dict__ is not identity.table:
            yield f"{identity.where or 'the module'}: __dict__ was replaced"
    for table in w.dict_contents:
        if not _same_table(table):
            yield _describe_table_difference(table)
    for sequence in w.sequences:
        if len(sequence.target) != len(sequence.items) or not all(
            map(is_, sequence.target, sequence.items)
        ):
            yield f"{sequence.where}: content changed"
    yield from (
        f"{array.where}: content changed"
        for array in w.byte_arrays
        if array.target != array.content
    )
    yield from (f"{name.where} changed" for name in w.names if not _same_lookup(name))
    for function in w.functions:
        if not _same_code(function):
            replaced = function.function.__code__ is not function.code
            yield f"{function.where}: {'code' if replaced else 'default arguments'} changed"
    yield from (
        f"{cell.where} changed"
        for cell in w.closure_cells
        if _read_cell(cell.cell) is not cell.value
    )
    for tensor in w.tensors:
        if not _same_tensor(tensor):
            yield _describe_tensor_difference(tensor)


def _describe_table_difference(record: DictContents) -> str:
    if record.owner is not None and record.owner.__mro__ is not record.mro:
        return f"{record.where}: its bases changed"
    now = {
        key: value
        for key, value in record.table.items()
        if not (record.skips_ignored and key == IGNORED)
        and not (record.definitions_only and not is_definition(value))
    }
    if record.values is None:
        now = dict.fromkeys(filter_names(record.table, record.ignored_prefix))
    before: dict[Any, Any] = (
        dict.fromkeys(record.keys)
        if record.values is None
        else dict(zip(record.keys, record.values, strict=True))
    )
    word = "replaced" if record.entry_kind in ("parameter", "buffer", "submodule") else "changed"
    for key in [*before, *now]:
        happened = "removed" if key not in now else "added" if key not in before else word
        if happened != word or (record.values is not None and now[key] is not before[key]):
            break
    else:
        return f"{record.where or 'the module'}: order of {record.entry_kind}s changed"
    if record.entry_kind in ("parameter", "buffer", "submodule"):
        return f"{record.entry_kind} {record.where + '.' if record.where else ''}{key}: {happened}"
    if record.entry_kind == "item":
        return f"{record.where}: item {key!r} {happened}"
    return f"{record.where or 'the module'}: {key} {happened}"


def _describe_tensor_difference(record: TensorMatch) -> str:
    if type(record.tensor) is not record.kind:
        return f"{record.where}: class {record.kind.__name__} -> {type(record.tensor).__name__}"
    for name, before, now in zip(
        FACTS, record.facts, read_tensor_facts(record.tensor), strict=True
    ):
        if before != now:
            return f"{record.where}: {name} {_format_fact(before)} -> {_format_fact(now)}"
    return f"{record.where}: changed"


def _format_fact(fact: object) -> str:
    return str(tuple(fact)) if isinstance(fact, tuple) else str(fact).removeprefix("torch.")
