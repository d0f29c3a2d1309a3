"""A hostile text ends in a reason, never in an exception."""

from __future__ import annotations

import ast

import pytest

from torch_cudal1.judge.checks.static.source_syntax import SOURCE_BYTES, parse_source


def test_a_module_is_its_tree() -> None:
    assert isinstance(parse_source("x = 1\n"), ast.Module)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def broken(:", "line 1"),
        ("x" * (SOURCE_BYTES + 1), "at most"),
        ("(" * 100_000, "does not parse"),
        ("\0", "does not parse"),
    ],
)
def test_a_text_that_does_not_parse_says_why(text: str, reason: str) -> None:
    parsed = parse_source(text)
    assert isinstance(parsed, str)
    assert reason in parsed
