"""A check's label and the profiles that run it."""

from __future__ import annotations

from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.profiles import PROFILES


def check(**fields: object) -> CheckSpec:
    return CheckSpec(name="shapes", asks="", run=lambda trial: [], **fields)  # type: ignore[arg-type]


def test_a_step_of_its_own_is_the_label_where_a_name_is_shared() -> None:
    assert check().label == "shapes"
    assert check(step="vast_shapes").label == "vast_shapes"


def test_a_check_is_part_of_its_first_profile_and_of_all_above() -> None:
    standard = check(since="standard")
    assert [name for name in PROFILES if standard.is_part_of(PROFILES[name])] == [
        "standard",
        "strict",
    ]
    assert all(check().is_part_of(profile) for profile in PROFILES.values())
