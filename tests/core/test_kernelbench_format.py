"""Both forms in which a task gives the arguments of its constructor."""

from __future__ import annotations

from typing import Any

import pytest

from torch_cudal1.core.kernelbench_format import constructor_arguments

ANSWERS: list[tuple[Any, tuple[list[Any], dict[str, Any]]]] = [
    ([], ([], {})),
    ([64, (3, 3)], ([64, (3, 3)], {})),
    ([[64], {"bias": False}], ([64], {"bias": False})),
    ([[], {}], ([], {})),
    ([64, {"bias": False}], ([64, {"bias": False}], {})),  # a dict as an argument of its own
    ([[1, 2], [3]], ([[1, 2], [3]], {})),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS, ids=repr)
def test_arguments_are_told_from_the_answer(answer: Any, expected: Any) -> None:
    assert constructor_arguments(answer) == expected
