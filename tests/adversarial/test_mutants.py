"""Every dishonest mutant of an honest Program is refused, every honest one accepted.

One child judges all of them: a Program has no state that a process could keep.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.adversarial.mutants import REGIONS, Mutant, mutants
from tests.adversarial.plans import candidate
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import PROFILES
from torch_cudal1.judge.reference.input_set import ReferenceCache
from torch_cudal1.judge.reference.region_reference import RegionReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

CPU = torch.device("cpu")
BOOK: ReferenceCache = {}


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as running:
        yield running


def list_failed(child: Child, mutant: Mutant, profile: str) -> list[CheckResult]:
    region, proposal = REGIONS[mutant.region], candidate(mutant.program)
    checks = contract(region, proposal)
    if all(check.passed for check in checks):
        trial = Trial(
            RegionReference(region, Contract(), CPU),
            proposal,
            Contract(),
            CPU,
            child,
            reference_cache=BOOK,
        )
        trial.load("candidate", proposal)
        checks += validate(trial, PROFILES[profile]).checks  # type: ignore[index]
        trial.drop(*list(trial.samples.values()))
    return [check for check in checks if not check.passed]


@pytest.mark.parametrize(
    "mutant", list(mutants()), ids=lambda m: f"{m.mutator}-{m.region}-{m.step}"
)
def test_a_mutant_is_refused_if_it_is_dishonest_and_accepted_if_not(
    child: Child, mutant: Mutant
) -> None:
    failed = list_failed(child, mutant, "fast")
    assert bool(failed) != mutant.honest, failed


def test_every_step_of_every_region_at_standard(
    child: Child, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--all-profiles", default=False):
        pytest.skip("minutes of work: --all-profiles")
    every = list(mutants(every_step=True))
    survivors = [m for m in every if not m.honest and not list_failed(child, m, "standard")]
    refused = [
        (m, failed) for m in every if m.honest and (failed := list_failed(child, m, "standard"))
    ]
    assert not survivors
    assert not refused
