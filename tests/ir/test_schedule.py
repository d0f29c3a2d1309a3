"""A Schedule is a value with two parts that is compared, hashed and stored as its text."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from torch_cudal1.ir.schedule import SCHEDULES, Schedule

TEXTS = {
    ("eager", False): "eager",
    ("regional", False): "regional",
    ("inductor", False): "inductor",
    ("max-autotune", False): "max-autotune",
    ("eager", True): "eager+graph",
    ("regional", True): "regional+graph",
    ("inductor", True): "inductor+graph",
    ("max-autotune", True): "max-autotune+graph",
}


def test_there_are_four_bases_with_and_without_a_graph() -> None:
    assert list(SCHEDULES) == list(TEXTS.values())


@pytest.mark.parametrize(("parts", "text"), TEXTS.items())
def test_parts_and_text_are_two_forms_of_one_value(parts: tuple[str, bool], text: str) -> None:
    schedule = Schedule(*parts)
    assert schedule == Schedule.parse(text) == text
    assert (schedule.base, schedule.cuda_graph) == parts
    assert schedule.compiles == (parts[0] != "eager")
    assert type(str(schedule)) is str
    assert f"{schedule}" == json.loads(json.dumps(schedule)) == text
    assert {schedule: 1.0}[text] == 1.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_copy_is_a_schedule_again(schedule: Schedule) -> None:
    for twin in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):  # noqa: S301  its own bytes
        assert (type(twin), twin) == (Schedule, schedule)


@pytest.mark.parametrize(
    "text", ["", "graph", "+graph", "eager+graphs", "eager+graph+graph", "Eager", "inductor+"]
)
def test_any_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        Schedule.parse(text)


def test_an_unknown_base_cannot_be_built() -> None:
    with pytest.raises(ValueError, match=r"base 'eager\+graph'"):
        Schedule("eager+graph")
