"""How answers to many questions become one result: the first disagreement, else the worst ratio."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.judge.checks.program_bench import REGION, ProgramChecker, get_last
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    _is_rounding_noise,
    find_form_problem,
    summarise,
)
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


def test_what_cancels_to_nothing_may_be_off_by_its_rounding_and_draws_may_not() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    one = torch.ones(1).expand(64, 32)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        y, g = torch.softmax(inputs[0].double(), -1), inputs[1].double()
        return [y * (g - (g * y).sum(-1, keepdim=True))]

    sample: Any = SimpleNamespace(inputs=[x, one], oracle=run, exact=run([x, one]))
    sample.get_exact = lambda position: sample.exact[position]
    y = torch.softmax(x, -1)
    eager = torch.ops.aten._softmax_backward_data(one.contiguous(), y, -1, torch.float32)
    other = one * y - y * (one * y).sum(-1, keepdim=True)
    assert _is_rounding_noise(sample, 0, other, eager)
    assert not _is_rounding_noise(sample, 0, other + 1e-5, eager)
    assert not _is_rounding_noise(sample, 0, other * float("nan"), eager)
    # Dropout: float64 draws otherwise, and eager is as far from it as the values are large.
    assert not _is_rounding_noise(sample, 0, other, torch.nn.functional.dropout(y, 0.5))
