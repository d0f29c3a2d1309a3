"""What a check is: a name, a function of a trial, and all that is known about it beside its code.

A `CheckSpec` is defined beside its function; `registry` puts them in order. It imports no check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.profiles import Profile, ProfileName
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["PROFILE_ORDER", "CheckName", "CheckSpec", "FailureKind"]

# what a failed check says of a program, for training: see `judge.pool.failures`
FailureKind: TypeAlias = Literal["compile", "run", "wrong", "hack", "unstable"]
PROFILE_ORDER: tuple[ProfileName, ...] = ("fast", "standard", "strict")


@dataclass(frozen=True, kw_only=True)
class CheckName:
    """A name under which a result is stored and documented.

    `asks`: its line in docs/judge.md. `since`: the weakest profile that runs it. `failure`: what a
    failed result says of a program. `module`: where its results are made, of a step the module of
    its function.
    """

    name: str
    asks: str
    module: str = ""
    since: ProfileName = "fast"
    failure: FailureKind = "wrong"


@dataclass(frozen=True, kw_only=True)
class CheckSpec(CheckName):
    """One step of the protocol: a name and the function that asks.

    Several steps may share a name: `step` tells them apart in the seconds that are recorded (the
    name by default). `knobs`: the fields of `Profile` that it reads. `replaces_only`: it asks about
    other inputs, modes and gradients than those of the examples, so it is left out for a candidate
    that will only run for inference on inputs of the examples' form. `is_concurrent`: on a CPU it
    may run beside the benchmark of another program, because it calls the candidate a few times
    only.
    """

    run: Callable[[Trial], list[CheckResult]]
    step: str = ""
    knobs: tuple[str, ...] = ()
    replaces_only: bool = False
    is_concurrent: bool = False

    def __post_init__(self) -> None:
        # A misspelt field would be documented and read by no check.
        if unknown := set(self.knobs) - set(Profile.__dataclass_fields__):
            raise ValueError(
                f"check {self.label!r}: knobs {sorted(unknown)}; expected fields of Profile"
            )

    @property
    def label(self) -> str:
        """Unique in the protocol; a key of the seconds that a verdict took."""
        return self.step or self.name

    def is_part_of(self, profile: Profile) -> bool:
        """Whether a profile runs it."""
        return PROFILE_ORDER.index(self.since) <= PROFILE_ORDER.index(profile.name)
