"""The registry: labels and names are unique where they must be, and every knob is read by a check."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.adversarial.case import case_files
from torch_cudal1.judge.checks.registry import (
    CHECK_NAMES,
    PROTOCOL,
    format_table,
    list_unasked,
    select_checks,
)
from torch_cudal1.judge.checks.spec import CheckName, CheckSpec
from torch_cudal1.judge.profiles import ALL_DISTRIBUTIONS, PROFILES, Profile, profile_for
from torch_cudal1.judge.reference.inputs import DISTRIBUTIONS


def test_labels_are_unique_and_a_shared_name_means_one_kind_of_failure() -> None:
    assert max(Counter(check.label for check in PROTOCOL).values()) == 1
    kinds = {(check.name, check.failure) for check in CHECK_NAMES}
    assert len(kinds) == len({name for name, _ in kinds})


@pytest.mark.parametrize(
    "check", CHECK_NAMES, ids=lambda check: getattr(check, "label", check.name)
)
def test_the_file_in_the_table_makes_results_of_that_name(check: CheckName) -> None:
    module = check.run.__module__ if isinstance(check, CheckSpec) else check.module
    assert f'"{check.name}"' in inspect.getsource(importlib.import_module(module))
    file = module.removeprefix("torch_cudal1.").replace(".", "/")
    (row,) = (
        line for line in format_table().splitlines() if line.startswith(f"| `{check.name}` |")
    )
    assert f"`{file}.py`" in row


def test_every_knob_of_a_profile_is_some_checks() -> None:
    knobs = {knob for check in PROTOCOL for knob in check.knobs}
    assert set(Profile.__dataclass_fields__) - knobs == {"name"}


@pytest.mark.parametrize("check", PROTOCOL, ids=lambda check: check.label)
def test_a_check_reads_the_knobs_that_it_names_and_no_others(check: CheckSpec) -> None:
    family = importlib.import_module(check.run.__module__)
    read = set(re.findall(r"profile\.(\w+)", inspect.getsource(family))) - {"name"}
    named = {
        knob
        for other in PROTOCOL
        if other.run.__module__ == family.__name__
        for knob in other.knobs
    }
    assert read - named == set(), "read, but not named by a check of this file"
    assert named - read - {"budget_s"} == set(), "named, but not read in this file"


def test_profiles_grow_and_a_candidate_for_inference_is_asked_less() -> None:
    fast, standard, strict = (
        select_checks(PROFILES[name]) for name in ("fast", "standard", "strict")
    )
    assert set(fast) < set(standard) < set(strict) == set(PROTOCOL)
    inference = select_checks(PROFILES["strict"], drop_in=False)
    assert [check.label for check in strict if check not in inference] == [
        "index_types",
        "shapes",
        "vast_shapes",
        "layouts",
        "dtypes",
        "grad",
        "loss_curve",
        "train_mode",
        "mode",
        "transforms",
        "guard_domain",
    ]


def test_a_few_checks_may_run_beside_a_benchmark() -> None:
    assert [check.label for check in PROTOCOL if check.is_concurrent] == [
        "state_dict",
        "env_diff",
        "env_diff_calls",
        "resource",
        "isolation",
        "env_diff_end",
    ]


def test_an_unknown_knob_cannot_be_named() -> None:
    with pytest.raises(ValueError, match="no_such_knob"):
        CheckSpec(name="x", asks="", run=lambda trial: [], knobs=("no_such_knob",))


def test_the_table_has_one_row_a_name_and_every_attack_expects_one_of_them() -> None:
    names = [line.split("`")[1] for line in format_table().splitlines()[2:]]
    assert names == list(dict.fromkeys(check.name for check in CHECK_NAMES))
    assert {file.case.expected for file in case_files()} <= set(names)


def test_profiles_grow_and_check_in_the_same_order() -> None:
    checks_by_profile = [select_checks(PROFILES[name]) for name in ("fast", "standard", "strict")]
    for less, more in pairwise(checks_by_profile):
        assert [detector for detector in more if detector in less] == list(less)
    assert checks_by_profile[-1] == PROTOCOL
    assert set(ALL_DISTRIBUTIONS) == set(DISTRIBUTIONS)
    assert [profile_for(name).name for name in ("train", "cudal1", "strict")] == [
        "fast",
        "fast",
        "strict",
    ]
    with pytest.raises(ValueError, match="distributions"):
        replace(PROFILES["fast"], distributions=("no such",))


def test_what_a_profile_does_not_ask_shrinks_to_nothing() -> None:
    fast, standard, strict = (list_unasked(name) for name in ("fast", "standard", "strict"))
    assert set(fast) > set(standard) > set(strict) == set()
    assert any(line.startswith("dtypes: ") for line in set(fast) - set(standard))
    assert list_unasked("strict", gradients=False) == (
        "grad, mode: gradients and train mode (--inference)",
    )
