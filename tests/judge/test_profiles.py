"""Profiles hold the numbers of the checks, and nonsense cannot be built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_cudal1.judge.profiles import PROFILES, profile_for


@pytest.mark.parametrize("change", [{"held": 1}, {"repeats": 2}, {"seeds": 0}])
def test_too_few_of_anything_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs at least 2 held outputs, 3 repeats and 1 seed"):
        replace(PROFILES["fast"], **change)  # type: ignore[arg-type]


def test_an_unknown_distribution_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'cauchy'"):
        replace(PROFILES["fast"], distributions=("cauchy",))


def test_training_and_published_numbers_validate_as_fast() -> None:
    assert [
        profile_for(name).name for name in ("fast", "train", "cudal1", "standard", "strict")
    ] == [
        "fast",
        "fast",
        "fast",
        "standard",
        "strict",
    ]
