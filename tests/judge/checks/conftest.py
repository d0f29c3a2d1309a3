"""What all tests of one module share: benches for sources, and a child for Programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adversarial.fork_server import fork_children
from tests.judge.checks.module_sources import CPU, REFERENCE, ModuleBench
from tests.judge.checks.program_bench import ProgramChecker
from tests.judge.programs import candidate, subject
from tests.judge.sources import SourceBench, source_bench
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import CheckResult, Contract, Region
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import PROFILES, ProfileName
from torch_cudal1.judge.reference.source_reference import read_reference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits


@pytest.fixture(scope="module")
def bench() -> Iterator[SourceBench]:
    with source_bench() as shared_bench:
        yield shared_bench


@pytest.fixture(scope="module")
def module_bench() -> Iterator[ModuleBench]:
    with fork_children(), Child(make_limits(Settings(), CPU), Contract()) as oracle:
        yield ModuleBench(*read_reference(oracle, REFERENCE, CPU))


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(make_limits(Settings(), CPU), Contract()) as shared_child:
        yield shared_child


@pytest.fixture
def check_program(child: Child) -> ProgramChecker:
    def run(
        region: Region, program: Program, profile: ProfileName, *checks: CheckSpec
    ) -> list[CheckResult]:
        trial = Trial(
            subject(region), candidate(program), Contract(), CPU, child, profile=PROFILES[profile]
        )
        trial.load("candidate", candidate(program))
        results = list(validate(trial, checks=(NUMERICS, *checks)).checks)
        trial.drop(*list(trial.samples.values()))
        return results

    return run
