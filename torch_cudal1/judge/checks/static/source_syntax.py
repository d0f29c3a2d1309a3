"""The syntax tree of a source by a stranger: bounded, parsed, never run. It looks for nothing in
it.
"""

from __future__ import annotations

import ast

__all__ = ["SOURCE_BYTES", "parse_source"]

SOURCE_BYTES = 1 << 20


def parse_source(text: str) -> ast.Module | str:
    """The tree, or why there is none. Hostile nesting ends in an exception of the parser, caught
    here.
    """
    # Parsing takes time and memory that grow with the text.
    if len(text) > SOURCE_BYTES:
        return f"a source of {len(text)} characters, at most {SOURCE_BYTES}"
    try:
        return ast.parse(text)
    except SyntaxError as error:
        return f"the source does not parse: {error.msg}, line {error.lineno}"
    # The parser's own limits: nesting raises these instead of a SyntaxError.
    except (ValueError, MemoryError, RecursionError) as error:
        return f"the source does not parse: {type(error).__name__} (nested too deeply?)"
