"""Each parameter, buffer and input moves the result as eager's does."""

from __future__ import annotations

import pytest
import torch

from tests.judge.checks.module_sources import FORWARD, WEIGHT, ModuleBench, ModuleCase
from tests.judge.checks.program_bench import CENTRED, REGION, ProgramChecker, get_last
from tests.judge.programs import linear_relu
from torch_cudal1.judge.checks.module_semantics.parameters import (
    PERTURB,
    _measure_difference,
    perturb_tensor,
)
from torch_cudal1.judge.checks.module_semantics.updates import UPDATE_PATH


def test_a_nudge_moves_every_element_by_a_tenth_to_twice_and_keeps_the_strides() -> None:
    tensor = torch.tensor([[0.0, 2.0], [-4.0, 8.0]]).t()
    moved = perturb_tensor(tensor)
    assert moved.stride() == tensor.stride()
    share = (moved - tensor).abs() / tensor.abs().clamp_min(1.0)
    assert bool(((share >= 0.1) & (share <= 1.0)).all())


def test_a_change_that_is_not_reproduced_exceeds_its_limit() -> None:
    before, after = torch.zeros(64), torch.ones(64)
    exact = [before.double(), after.double()]
    reproduced = _measure_difference([before, after], [before, after], exact)
    dropped = _measure_difference([before, before], [before, after], exact)
    assert reproduced is not None
    assert dropped is not None
    assert reproduced.is_visible
    assert reproduced.error <= reproduced.limit < dropped.error


MODULES: dict[str, ModuleCase] = {
    "a bias dropped": (
        {
            "forward": FORWARD.replace(
                "self.linear(x + y)", "functional.linear(x + y, self.linear.weight)"
            )
        },
        "fast",
        (PERTURB,),
        "perturb",
    ),
    "a weight frozen at the first call": (
        {
            "init": "self.w = None",
            "before": "self.w = self.linear.weight.detach().clone() if self.w is None else self.w",
            "result": WEIGHT,
        },
        "fast",
        (UPDATE_PATH,),
        "update_path",
    ),
    "a weight cached by address and version": (
        {
            "init": "self.key = None",
            "before": "p = self.linear.weight\nkey = p.data_ptr(), p._version\n"
            "if self.key != key: self.key, self.w = key, p.detach().clone()",
            "result": WEIGHT,
        },
        "fast",
        (UPDATE_PATH,),
        "update_path",
    ),
    "a weight used through a view made once": (
        {
            "init": "self.view = [self.linear.weight.data]",
            "before": "self.w = self.view[0]",
            "result": WEIGHT,
        },
        "standard",
        (UPDATE_PATH,),
        "update_path",
    ),
    "a weight recomputed at each call": (
        {"before": "self.w = self.linear.weight * 1.0", "result": WEIGHT},
        "standard",
        (UPDATE_PATH,),
        None,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_source_that_ignores_a_parameter_or_its_update_is_refused_and_an_honest_source_passes(
    module_bench: ModuleBench, name: str
) -> None:
    module_bench.assert_verdict(MODULES[name])


def test_a_parameter_that_does_not_matter_is_recorded_and_one_that_does_must_move_the_result(
    check_program: ProgramChecker,
) -> None:
    assert (
        "unobservable: parameter 1"
        in get_last(check_program(CENTRED, CENTRED.program, "fast", PERTURB)).detail
    )
    moved = get_last(check_program(REGION, REGION.program, "fast", PERTURB))
    assert moved.passed
    assert "2 of 2" in moved.detail
    assert moved.value is not None


def test_a_change_that_rounding_hides_is_found_where_the_bias_dominates(
    check_program: ProgramChecker,
) -> None:
    """In bfloat16 a bias is lost among inputs of size 1e4, not among small ones."""
    region = linear_relu(torch.bfloat16)
    assert (
        "unobservable"
        not in get_last(check_program(region, region.program, "fast", PERTURB)).detail
    )


def test_other_parameters_at_the_same_and_at_other_addresses_are_read(
    check_program: ProgramChecker,
) -> None:
    check = get_last(check_program(REGION, REGION.program, "fast", UPDATE_PATH))
    assert check.passed
    assert "same addresses" in check.detail
