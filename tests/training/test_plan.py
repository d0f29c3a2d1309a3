"""Plans as files: what they say, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.training.small_experiment import PLAN
from torch_cudal1.core.errors import SettingError
from torch_cudal1.training.experiments.plan import ARMS, read_plan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", sorted(ARMS))
def test_each_arm_differs_from_the_papers_method_in_what_its_title_says(name):
    differing_fields = {
        key for key, value in asdict(ARMS[name]).items() if value != asdict(ARMS["A6"])[key]
    } - {"name", "title"}
    expected: dict[str, set[str]] = {
        "A0": {"start", "learns", "selector"}, "A1": {"start", "learns", "selector"}, "A2": {"learns", "selector"},
        "A3": {"learns"}, "A6": set(), "A8": {"without_analysis"}, "A9": {"smoothed"}, "A10": {"reward"}, "A11": {"objective"},
        "A12": {"start", "learns", "selector"},
    }  # fmt: skip
    assert differing_fields == expected.get(name, {"selector"})


PLANS = sorted((Path(__file__).parents[2] / "benchmarks" / "training").glob("*.json"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_of_the_repository_are_plans_that_say_what_counts(path):
    plan = read_plan(path)
    assert len(plan.endpoint) > 50
    compared = (
        {"A4"} if "red team" in plan.name else {"A4", "A6"}
    )  # a red team compares evaluators of one arm, not arms
    assert compared <= set(plan.arms)


def test_a_plan_file_is_read_and_its_digest_is_of_what_decides(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(asdict(PLAN)))
    assert read_plan(path) == PLAN
    assert replace(PLAN, seeds=(5,)).digest == PLAN.digest != replace(PLAN, budget=21).digest


def _wrong(**change: object) -> dict[str, object]:
    return {**asdict(PLAN), **change}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([], "plan"),
        (_wrong(budgt=1), "budgt"),
        (_wrong(device="tpu"), "device"),
        (_wrong(arms=["A99"]), "A99"),
        (_wrong(rl={"group": "8"}), "rl.group"),
        (_wrong(rl={"smoothing": {"pool": "all"}}), "smoothing.pool"),
        (_wrong(seeds=[1, 1]), "seeds"),
        ({"name": "x"}, "device"),
    ],
)
def test_a_plan_that_is_none_is_refused_by_name(tmp_path, content, field):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SettingError, match=field):
        read_plan(path)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    with pytest.raises(SettingError, match="JSON"):
        read_plan(tmp_path / "missing.json")
