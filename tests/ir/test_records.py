"""Records of the pipeline: keys hold what decides a choice and nothing else, and illegal
combinations cannot be built.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import (
    TOLERANCE_VERSION,
    Candidate,
    CheckResult,
    Contract,
    Entry,
    Region,
    Target,
    Timing,
    Verdict,
)
from torch_cudal1.ir.schedule import Schedule

SPEC = TensorSpec("float32", (4, 4), (4, 1), "cpu")
PROGRAM = Program((SPEC, SPEC), (Aten("aten.mm.default", (Value(0), Value(1)), (), (2,)),), (2,))
PASSED = Verdict((CheckResult("numerics", True, 0.5, 1.0),))
TARGET = Target("cuda", "sm_90", "NVIDIA H200", "570", "2.11", "3.6")


def make_timing(**changes: Any) -> Timing:
    fields = {
        "verdict": PASSED,
        "baseline": "inductor",
        "candidate_us": 5.0,
        "baseline_us": 10.0,
        "speedup": 2.0,
        "low": 1.8,
        "high": 2.2,
        "pairs": 30,
    }
    return Timing(**{**fields, **changes})


def make_entry(evidence: dict[str, Any], origin: str = "seeds") -> Entry:
    choice = Candidate(PROGRAM, Schedule.parse("eager"), origin)
    return Entry("key", "name", TARGET, Contract(), choice, evidence, (), "2026-01-01", "1.0")


def test_a_target_s_family_is_the_device_and_its_architecture() -> None:
    assert TARGET.family == replace(TARGET, sku="NVIDIA H100", driver="").family == "cuda-sm_90"
    assert replace(TARGET, arch="sm_100").family != TARGET.family


def test_a_contract_s_digest_holds_everything_but_the_order_of_rights() -> None:
    contract = Contract("match", ("matmul", "conv"))
    assert contract.digest == Contract("match", ("conv", "matmul")).digest
    variants = [
        Contract("strict", ("matmul", "conv")),
        Contract("match", ("matmul",)),
        replace(contract, assume_finite=True),
        replace(contract, version=TOLERANCE_VERSION + 1),
    ]
    assert len({contract.digest, *(variant.digest for variant in variants)}) == 5


def test_a_region_s_key_holds_no_name_no_role_and_no_kind() -> None:
    region = Region(PROGRAM, ("input", "parameter"))
    renamed = Region(PROGRAM, ("parameter", "buffer"), "backward", "island", "layer")
    assert region.key == renamed.key == PROGRAM.digest
    turned = replace(PROGRAM, steps=(Aten("aten.mm.default", (Value(1), Value(0)), (), (2,)),))
    assert Region(turned, ("input", "parameter")).key != region.key


def test_a_region_needs_a_role_for_each_input() -> None:
    with pytest.raises(ValueError, match="1 roles for 2 inputs"):
        Region(PROGRAM, ("input",))


def test_a_candidate_s_schedule_is_parsed_and_part_of_its_digest() -> None:
    candidate = Candidate(PROGRAM, "inductor", "baseline")  # type: ignore[arg-type]  as stored text
    assert candidate.schedule == Schedule.parse("inductor")
    assert candidate.label == "inductor"
    eager = replace(candidate, schedule=Schedule.parse("eager"), techniques=("diag", "fold"))
    assert eager.label == "diag+fold -> eager"
    assert eager.digest != candidate.digest
    assert replace(candidate, origin="seeds", techniques=("fold",)).digest == candidate.digest
    with pytest.raises(ValueError, match="warp"):
        Candidate(PROGRAM, "warp speed", "seeds")  # type: ignore[arg-type]


def test_a_verdict_without_checks_did_not_pass() -> None:
    assert not Verdict(()).passed
    assert PASSED.passed
    failed = CheckResult("aliasing", False)
    verdict = Verdict((*PASSED.checks, failed, CheckResult("purity", False)))
    assert not verdict.passed
    assert verdict.failure is failed
    assert PASSED.failure is None


def test_the_worst_error_ratio_is_the_largest_measured_one() -> None:
    checks = (
        CheckResult("numerics", True, 0.5, 1.0),
        CheckResult("numerics", True, 0.75, 1.0),
        CheckResult("numerics", True),
        CheckResult("memory", True, 9.0),
    )
    assert Verdict(checks).worst_error_ratio == 0.75
    assert Verdict(checks[2:]).worst_error_ratio is None


def test_a_wrong_candidate_has_no_timing() -> None:
    with pytest.raises(ValueError, match="needs a passed Verdict"):
        make_timing(verdict=Verdict((CheckResult("numerics", False),)))
    assert make_timing().saved_us == 5.0


@pytest.mark.parametrize(
    ("low", "high"), [(2.1, 2.2), (1.8, 1.9), (0.0, 2.2), (-1.0, 2.2), (math.nan, 2.2)]
)
def test_an_interval_holds_its_speed_up(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="does not hold the speed-up"):
        make_timing(low=low, high=high)


def test_an_entry_promises_the_lower_bound_and_nothing_without_a_timing() -> None:
    evidence = {"timing": {"low": 1.25, "speedup": 1.5}}
    assert make_entry(evidence).speedup == 1.25
    assert make_entry(evidence, origin="baseline").speedup == 1.0
    assert make_entry({**evidence, "granularity": "island"}).speedup == 1.0


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        ({}, ""),
        ({"baselines_us": "damaged"}, ""),
        ({"baselines_us": {"eager": 3.0, "inductor": 2.0}}, ""),
        ({"baselines_us": {"eager": 3.0}}, "the search left it out"),
        (
            {
                "baselines_us": {"eager": 3.0},
                "baseline_failures": {"inductor": "it ran out of memory"},
            },
            "it ran out of memory",
        ),
    ],
)
def test_an_entry_says_why_inductor_was_no_baseline(evidence: dict[str, Any], reason: str) -> None:
    assert make_entry(evidence).without_inductor == reason


def test_the_values_of_constants_are_part_of_a_key() -> None:
    keys = {
        Region(
            replace(
                PROGRAM, inputs=(SPEC,), constants=("c",), payloads={"c": torch.full((4, 4), value)}
            ),
            ("input",),
        ).key
        for value in (1.0, 2.0, 2.0)
    }
    assert len(keys) == 2
