"""A broad `except` that does not raise again stands at a door, where what comes must not go
further. These are all the doors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "torch_cudal1"
BROAD = {"Exception", "BaseException"}
# file -> what must not go further, and where to
DOORS = {
    "api/backend.py": "a failure of this package, into the user's compilation: Inductor runs",
    "api/dispatcher.py": "a failure of this package, into the user's call: the module's own forward runs",
    "api/shadow.py": "what the user's on_mismatch raises, into the user's call that reports to it",
    "cli/commands/program/run.py": "what the program of `cudal1 run` raises, past the report: shown as Python shows it",
    "judge/worker/session.py": "what a candidate raises, out of the process that exists to run it: it is the candidate's reason",
}


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = (
        []
        if handler.type is None
        else [n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)]
    )
    return handler.type is None or bool(BROAD & set(caught))


def swallowing(tree: ast.AST) -> Iterator[int]:
    """Lines of broad handlers that do not end by raising."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ExceptHandler)
            and is_broad(node)
            and not isinstance(node.body[-1], ast.Raise)
        ):
            yield node.lineno


def test_every_broad_except_is_a_door_that_is_named_here_and_there_is_one_each() -> None:
    lines_of_function = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := list(swallowing(ast.parse(path.read_text()))))
    }
    assert {name: len(lines) for name, lines in lines_of_function.items()} == dict.fromkeys(
        DOORS, 1
    ), lines_of_function


def test_the_search_finds_one() -> None:
    assert list(
        swallowing(ast.parse("try:\n    pass\nexcept (ValueError, Exception):\n    pass"))
    ) == [3]
    assert list(swallowing(ast.parse("try:\n    pass\nexcept:\n    x = 1"))) == [3]
    assert (
        list(
            swallowing(
                ast.parse("try:\n    pass\nexcept Exception as e:\n    raise OSError from e")
            )
        )
        == []
    )
