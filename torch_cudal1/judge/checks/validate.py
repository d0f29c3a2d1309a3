"""The ordered protocol: which detectors a profile asks, in which order, up to the first that fails.

A Verdict lists what ran, so what a profile leaves out is not claimed. Tests of speed are elsewhere;
so is the decision.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch_cudal1.core import telemetry
from torch_cudal1.ir.records import Check, Verdict
from torch_cudal1.judge.checks import Detector
from torch_cudal1.judge.checks.concurrent import capture, reentrancy, stream_order
from torch_cudal1.judge.checks.environment import env_diff, env_diff_calls
from torch_cudal1.judge.checks.fresh_outputs import fresh_output
from torch_cudal1.judge.checks.history import call_history, repeat
from torch_cudal1.judge.checks.int64_indexing import vast_shapes
from torch_cudal1.judge.checks.layouts import dtypes, layouts, shapes
from torch_cudal1.judge.checks.loss_curve import loss_curve
from torch_cudal1.judge.checks.modes import grad, guard_domain, mode, state_dict, train_mode
from torch_cudal1.judge.checks.negative_controls import impostor
from torch_cudal1.judge.checks.numerics import numerics
from torch_cudal1.judge.checks.parameters import perturb, scalars, update_path
from torch_cudal1.judge.checks.process import isolation, resource
from torch_cudal1.judge.checks.profiles import PROFILES, Profile, ProfileName
from torch_cudal1.judge.checks.redzone_reads import ghost, guard_band, guard_page, poison
from torch_cudal1.judge.checks.sanitizer import sanitizer
from torch_cudal1.judge.checks.special_values import special
from torch_cudal1.judge.checks.tf32 import rights
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = ["FAST", "PROTOCOL", "Step", "detectors_of", "validate"]


@dataclass(frozen=True)
class Step:
    """One question of the protocol, and the weakest profile that asks it."""

    detector: Detector
    since: ProfileName = "fast"


# Cheap and decisive first. Later ones read what earlier ones ran: `numerics` the input sets,
# `fresh_output` the repeated calls.
PROTOCOL: tuple[Step, ...] = (
    Step(state_dict),
    Step(env_diff),
    Step(numerics),
    Step(fresh_output),
    Step(env_diff_calls),
    Step(poison),
    Step(guard_band),
    Step(guard_page),
    Step(rights),
    Step(impostor),
    Step(perturb),
    Step(scalars),
    Step(update_path),
    Step(shapes),
    Step(vast_shapes, "strict"),
    Step(layouts),
    Step(dtypes, "standard"),
    Step(special),
    Step(call_history),
    Step(stream_order),
    Step(capture, "standard"),
    Step(reentrancy, "standard"),
    Step(repeat),
    Step(grad),
    Step(loss_curve, "strict"),
    Step(train_mode),
    Step(mode, "standard"),
    Step(guard_domain, "standard"),
    Step(ghost),
    Step(sanitizer, "standard"),
    Step(resource),
    Step(isolation),
)
# What a source is asked beyond inference on inputs of the examples' form.
_BEYOND: frozenset[Detector] = frozenset(
    {shapes, vast_shapes, layouts, dtypes, grad, loss_curve, train_mode, mode, guard_domain},
)
_ORDER = tuple(PROFILES)


def detectors_of(profile: Profile, *, drop_in: bool = True) -> tuple[Detector, ...]:
    """What a profile asks, in order. `drop_in`: of what takes the reference's place; else of what
    will only run for inference on inputs of the examples' form.
    """
    asked = (
        step.detector for step in PROTOCOL if _ORDER.index(step.since) <= _ORDER.index(profile.name)
    )
    return tuple(detector for detector in asked if drop_in or detector not in _BEYOND)


FAST: tuple[Detector, ...] = detectors_of(PROFILES["fast"])


def validate(
    trial: Trial, profile: Profile | None = None, *, detectors: Sequence[Detector] | None = None
) -> Verdict:
    """The detectors of the profile (the trial's own by default) in order, up to the first failed
    check.

    A child that fails or dies is a failed check. `detectors`: these and no others.
    """
    trial.profile = profile or trial.profile
    checks: list[Check] = []
    seconds: dict[str, float] = {}
    for detector in detectors_of(trial.profile) if detectors is None else detectors:
        if any(not check.passed for check in checks):
            break
        begin = time.monotonic()
        checks += _asked(detector, trial)
        trial.relieve()
        seconds[getattr(detector, "__name__", "detector")] = round(time.monotonic() - begin, 3)
    telemetry.record("judge", "validated", trial.subject.key[:12], seconds=seconds)
    return Verdict(tuple(checks), trial.profile.name)


def _asked(detector: Detector, trial: Trial) -> list[Check]:
    try:
        return detector(trial)
    except CandidateFailure as error:
        return [Check(error.detector, False, detail=f"{error.stage}: {error.found}")]
    except ReferenceFailure as error:
        return [
            Check("inputs", False, detail=f"eager refuses the inputs made for it: {error.found}")
        ]
