"""Every cheat is refused by the detector that its file names, the first in the order of the protocol; every twin is accepted.

By default at the weakest profile that must catch the case; with `--all-profiles` at that and every stronger one, where more is
asked and another detector may come first.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.adversarial.case import PROFILES, Case, CaseFile, Profile, case_files, controls
from tests.adversarial.fork_server import fork_children
from tests.adversarial.judging import Bench, Side, TooBusy, bench, failures
from torch_cudal1.ir.records import CheckResult

FILES = case_files()
CONTROLS = controls()
GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module")
def benches() -> Iterator[dict[str, Bench]]:
    """A bench for each device that is here."""
    with fork_children(), bench(torch.device("cpu")) as cpu:
        if not GPUS:
            yield {"cpu": cpu}
            return
        with bench(torch.device("cuda", 0)) as cuda:
            yield {"cpu": cpu, "cuda": cuda}


@pytest.fixture
def profiles(request: pytest.FixtureRequest) -> tuple[Profile, ...]:
    """The profiles from the case's first on that this run asks for."""
    first = PROFILES.index(request.getfixturevalue("file").case.first_profile)
    if request.config.getoption("--all-profiles", default=False):
        return PROFILES[first:]
    if PROFILES[first] == "strict":
        pytest.skip("strict takes a minute a candidate: --all-profiles")
    return PROFILES[first : first + 1]


def run_side(case_bench: Bench, file: CaseFile, side: Side, profile: Profile) -> list[CheckResult]:
    """The checks of one side; all detectors for a cheat that only one of them may catch."""
    try:
        return case_bench.judge(file, side, profile, to_the_end=side == "cheat" and file.case.alone)
    except TooBusy as error:
        pytest.skip(str(error))


def select_cases(*forms: str, static: bool) -> list[object]:
    """The files of these forms. `static`: what is refused before anything runs needs no GPU."""
    chosen = [file for file in FILES if file.case.form in forms]
    return [
        pytest.param(
            file, id=file.id, marks=() if static and file.case.static else list_marks(file.case)
        )
        for file in chosen
    ]


_DRAWS = 3  # inputs are drawn in secret, and an earlier detector may be lucky; refused it must be every time


def list_marks(case: Case) -> list[pytest.MarkDecorator]:
    """What skips a case here."""
    if "gpu" not in case.needs:
        return []
    needed = 2 if "two_gpus" in case.needs else 1
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(needed > GPUS, reason=f"{GPUS} NVIDIA GPUs here, needs {needed}"),
    ]


@pytest.mark.parametrize("file", select_cases("source", "program", static=True))
def test_the_cheat_is_refused_by_its_detector(
    benches: dict[str, Bench], file: CaseFile, profiles: tuple[Profile, ...]
) -> None:
    case = file.case
    case_bench = benches["cpu" if case.static else case.device]
    for profile in profiles:
        for draw in range(_DRAWS):
            checks = run_side(case_bench, file, "cheat", profile)
            refused = [check for check in checks if not check.passed]
            assert refused, f"every check passed at {profile}"
            named = refused[0].name == case.expected and (
                not case.alone or failures(checks) == [case.expected]
            )
            if named or profile != case.first_profile:
                break
            assert draw + 1 < _DRAWS, (
                f"refused, but by others than {case.expected!r} every time: {refused}"
            )


@pytest.mark.parametrize("file", select_cases("source", "program", static=False))
def test_its_honest_twin_is_accepted(
    benches: dict[str, Bench], file: CaseFile, profiles: tuple[Profile, ...]
) -> None:
    for profile in profiles:
        checks = run_side(benches[file.case.device], file, "honest", profile)
        assert [check for check in checks if not check.passed] == [], profile


@pytest.mark.parametrize("name", CONTROLS)
def test_an_unusual_honest_candidate_is_accepted(benches: dict[str, Bench], name: str) -> None:
    checks = benches["cpu"].source(*CONTROLS[name], "fast")
    assert [check for check in checks if not check.passed] == []


@pytest.mark.parametrize("file", select_cases("runtime", static=False))
def test_the_runtime_withstands_the_attack(file: CaseFile) -> None:
    file.module.attack()


@pytest.mark.parametrize("file", select_cases("runtime", static=False))
def test_the_runtime_serves_the_honest_twin(file: CaseFile) -> None:
    file.module.twin()
