"""What bytecode looks up: names among globals and builtins, and modules that it imports."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["CodeNames", "iter_code", "read_code_names"]

_GLOBAL_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


@dataclass(frozen=True)
class CodeNames:
    """Of a code and of the functions that it makes. `globals_`: names that are looked up among
    globals and builtins; `imports`: imported modules as (level, name); `names`: all names,
    attributes and closure variables too; `texts`: constants that can be the name of an attribute.
    """

    globals_: frozenset[str]
    imports: frozenset[tuple[int, str]]
    names: frozenset[str]
    texts: frozenset[str]


@functools.lru_cache(maxsize=4096)
def read_code_names(code: types.CodeType) -> CodeNames:
    """The names in `code`, which are the same whenever it runs."""
    globals_: set[str] = set()
    imports: set[tuple[int, str]] = set()
    names: set[str] = set()
    texts: set[str] = set()
    for part in iter_code(code):
        names.update(part.co_names, part.co_freevars)
        texts.update(
            constant
            for constant in part.co_consts
            if isinstance(constant, str) and constant.isidentifier()
        )
        constants: list[object] = []
        for instruction in dis.get_instructions(part):
            if instruction.opname in _GLOBAL_READS:
                globals_.add(str(instruction.argval))
            elif instruction.opname == "IMPORT_NAME":
                # Before it stand the level and the names that are wanted.
                level = constants[-2] if len(constants) > 1 else 0
                imports.add((level if isinstance(level, int) else 0, str(instruction.argval)))
            elif instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
                constants.append(instruction.argval)
    return CodeNames(*map(frozenset, (globals_, imports, names, texts)))  # type: ignore[arg-type]


def iter_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """`code` and the code of the functions and classes that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from iter_code(constant)
