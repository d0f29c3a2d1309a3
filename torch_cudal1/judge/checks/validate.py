"""Runs the checks of a profile in order, up to the first that fails.

A Verdict lists what ran, so what a profile leaves out is not claimed. Checks of speed are
elsewhere; so is the decision.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch_cudal1.core import telemetry
from torch_cudal1.ir.records import CheckResult, Verdict
from torch_cudal1.judge.checks.registry import select_checks
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.profiles import Profile
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = ["validate"]


def validate(
    trial: Trial, profile: Profile | None = None, *, checks: Sequence[CheckSpec] | None = None
) -> Verdict:
    """The results of the profile's checks (the trial's own profile by default), up to the first
    failure.

    A child that fails or dies is a failed result. `checks`: these and no others.
    """
    trial.profile = profile or trial.profile
    results: list[CheckResult] = []
    seconds: dict[str, float] = {}
    for check in select_checks(trial.profile) if checks is None else checks:
        # Later checks build on earlier ones: after a failure they would report its consequences.
        if any(not result.passed for result in results):
            break
        begin = time.monotonic()
        results += _run_check(check, trial)
        # The next check may need the memory that this process caches.
        trial.free_memory()
        seconds[check.label] = round(time.monotonic() - begin, 3)
    telemetry.record("judge", "validated", trial.reference.key[:12], seconds=seconds)
    return Verdict(tuple(results), trial.profile.name)


def _run_check(check: CheckSpec, trial: Trial) -> list[CheckResult]:
    try:
        return check.run(trial)
    # The detector names what failed: a lost process or a broken protocol is not this check's
    # question.
    except CandidateFailure as error:
        return [CheckResult(error.detector, False, detail=f"{error.stage}: {error.found}")]
    # Where eager refuses inputs made for it, nothing can be said of the candidate.
    except ReferenceFailure as error:
        return [
            CheckResult(
                "inputs", False, detail=f"eager refuses the inputs made for it: {error.found}"
            )
        ]
