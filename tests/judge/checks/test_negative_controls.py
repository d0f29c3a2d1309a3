"""The wrong results that the comparison must refuse; that it does is in test_validate."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.judge.checks.program_bench import CENTRED, REGION, ProgramChecker, get_last
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.negative_controls import (
    IMPOSTOR,
    _ControlResult,
    _estimate_median,
    _list_damaged,
    _list_rounded,
)
from torch_cudal1.judge.profiles import PROFILES, ProfileName
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.trial import Trial


def test_damaged_results_differ_where_they_say() -> None:
    expected = torch.ones(32, 32)
    damaged = {name: wrong for name, wrong, _ in _list_damaged(expected)}
    assert {name: int((wrong != expected).sum()) for name, wrong in damaged.items()} == {
        "the last element unwritten": 1,
        "the last row unwritten": 32,
        "a tile unwritten": 256,
    }
    assert torch.equal(expected, torch.ones(32, 32))


def test_special_values_are_replaced_where_there_are_some() -> None:
    expected = torch.tensor([1.0, float("nan")])
    assert "NaN and infinities replaced" in [name for name, _, _ in _list_damaged(expected)]


def test_results_are_rounded_to_each_coarser_type() -> None:
    value = torch.tensor([1 + 2.0**-12])
    assert [name.rpartition(" ")[2] for name, _, _ in _list_rounded(value)] == [
        "bfloat16",
        "float16",
        "TF32",
    ]
    assert list(_list_rounded(value.half())) == []
    assert _estimate_median(torch.tensor([1.0, 5.0, float("nan"), 3.0])) == 3.0


def test_a_control_needs_several_distributions_and_sets_to_count_as_refused() -> None:
    control = _ControlResult(basic=True, refused=["normal", "normal", "shifted"])
    assert control.has_enough_refusals((2, 3))
    assert not control.has_enough_refusals((3, 3))


def test_the_controls_are_counted_and_unobservable_ones_are_named(
    check_program: ProgramChecker,
) -> None:
    """Some draws of inputs show even that parameter, by rounding alone."""
    for _ in range(4):
        check = get_last(check_program(CENTRED, CENTRED.program, "standard", IMPOSTOR))
        assert check.passed
        assert "parameter 1 zeroed" in check.detail
        assert check.limit == 19
        if "unobservable: parameter 1 zeroed" in check.detail:
            break
    assert "unobservable: parameter 1 zeroed" in check.detail
    assert check.value == 18
    full_check = get_last(check_program(REGION, REGION.program, "standard", IMPOSTOR))
    assert full_check.value == full_check.limit


@pytest.mark.parametrize(
    ("profile", "is_shared", "times"),
    [("fast", True, 1), ("fast", False, 3), ("standard", True, 3)],
)
def test_controls_run_once_for_all_candidates_only_where_no_candidate_has_a_part_in_them(
    monkeypatch: pytest.MonkeyPatch, profile: ProfileName, is_shared: bool, times: int
) -> None:
    from torch_cudal1.judge.checks import negative_controls as module

    def fail(*_: object) -> Any:
        raise AssertionError("nothing is to be run")

    controlled_sets: list[str] = []

    def note_controls(trial: Trial, samples: Sequence[InputSet]) -> list[CheckResult]:
        controlled_sets.append(samples[0].name)
        return [CheckResult("impostor", True)]

    monkeypatch.setattr(module, "_run_controls", note_controls)
    samples = {name: InputSet(name, "normal", [], fail, fail, is_shared) for name in ("a", "b")}
    for _ in range(3):
        candidate = SimpleNamespace(profile=PROFILES[profile], contract=Contract(), samples=samples)
        assert [check.passed for check in IMPOSTOR.run(cast(Trial, candidate))] == [True]
    assert len(controlled_sets) == times
