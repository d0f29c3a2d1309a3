"""How answers to many questions become one result: the first disagreement, else the worst ratio."""

from __future__ import annotations

import pytest
import torch

from tests.judge.checks.program_bench import REGION, ProgramChecker, get_last
from torch_cudal1.judge.checks.agreement import Agreement, find_form_problem, summarise
from torch_cudal1.judge.checks.layouts import DTYPES, LAYOUTS, SHAPES
from torch_cudal1.judge.checks.module_semantics.gradients import GRAD
from torch_cudal1.judge.checks.module_semantics.modes import MODE, STATE_DICT
from torch_cudal1.judge.checks.module_semantics.scalars import SCALARS
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.tf32 import RIGHTS
from torch_cudal1.judge.reference.region_reference import Result
from torch_cudal1.judge.wire.properties import describe


def result(*outputs: torch.Tensor | None, tree: str = "") -> Result:
    return Result(list(outputs), describe(outputs, []), tree)


def test_the_first_disagreement_is_reported_with_its_question() -> None:
    (check,) = summarise(
        "shapes", [Agreement("batch 3", "", 1.0, 2.0), Agreement("batch 1", "off", 9.0, 2.0)], ""
    )
    assert (check.passed, check.value, check.detail) == (False, 9.0, "batch 1: off")


def test_without_a_disagreement_the_worst_ratio_counts_and_refusals_of_eager_are_reported() -> None:
    (check,) = summarise(
        "shapes", [Agreement("a", "", 1.0, 2.0), None, Agreement("b", "", 1.5, 2.0)], ""
    )
    assert (check.passed, check.value, check.detail) == (True, 1.5, "a, b; eager refuses 1 others")


def test_where_nothing_could_be_asked_the_result_says_why() -> None:
    (check,) = summarise("shapes", [None], "no plain input")
    assert check.passed
    assert check.detail == "not applicable: no plain input"


def test_form_comes_before_values() -> None:
    eager = result(torch.ones(2, 3))
    assert find_form_problem(result(torch.zeros(2, 3)), eager) == ""
    assert "dtype" in find_form_problem(result(torch.ones(2, 3).half()), eager)
    assert "strides" in find_form_problem(result(torch.ones(3, 2).t()), eager)
    assert "no tensor" in find_form_problem(result(None), eager)
    assert "the result is" in find_form_problem(
        result(torch.ones(2, 3), tree="list"), result(torch.ones(2, 3), tree="tuple")
    )


@pytest.mark.parametrize(
    "detector", [SHAPES, LAYOUTS, DTYPES, SCALARS, GRAD, MODE, STATE_DICT, RIGHTS]
)
def test_a_check_that_does_not_apply_to_programs_says_so(
    check_program: ProgramChecker, detector: CheckSpec
) -> None:
    check = get_last(check_program(REGION, REGION.program, "standard", detector))
    assert check.passed
    assert check.detail.startswith("not applicable: ")
