"""Checks in production: a sampled call of a swapped region also runs the baseline, on the same
inputs, and the two are compared.

    call ──> nothing to check ──> kernel
      └─1 in 1/rate──> baseline, kernel ──> alike ──> the kernel's result
                                         └─> differ ──> the BASELINE's result; the candidate runs nowhere again, now and later

A sampled call pays for both runs, for the comparison and, on a GPU, for waiting until it is known;
every other call of a watched region pays for one Python call; at rate 0 nothing is put in the way.
The comparison is the judge's, without a float64 result: it finds what is wrong, not what is a
little less accurate. Where a call differs, float64 runs tell whether sums cancelled, which is not
wrong. A kernel that writes where it must not is not looked for here.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SettingError
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.graph.swap import FAILURES, Around, Swapped, withdraw
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.judge.reference.analysis import analyse
from torch_cudal1.judge.reference.compare import compare, unit_roundoff
from torch_cudal1.judge.reference.float64 import Infeasible, exact_outputs, sway
from torch_cudal1.search.tune import Choice
from torch_cudal1.store.cache.local_cache import NotStored
from torch_cudal1.store.cache.quarantine import Quarantined, hold_back
from torch_cudal1.store.context import Place

__all__ = ["NotWatched", "watched"]

_TF32_ROUNDOFF = 2.0**-11
_TENSOR_CORE_STEPS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "linear", "matmul")
# of integers chosen among rounded numbers (an argmax): ties are taken otherwise, and rounding makes
# ties
_OTHER_CHOICES = 0.1


@dataclass(frozen=True)
class NotWatched:
    """Why a region is not checked in production."""

    reason: str


@dataclass(frozen=True)
class _Tolerance:
    """What `compare` is told of a region."""

    precision: str
    longest: int
    drift: float
    rounded_choices: bool  # integer outputs may come from floating-point numbers


def watched(choice: Choice, place: Place, *, writes: bool) -> Around | NotWatched:
    """What to put in front of the callable built for `choice`, or why nothing. `writes`: the call
    writes to its own inputs.

    Raises SettingError for an `on_mismatch` that cannot be found.
    """
    settings, region = place.settings, choice.region
    if not settings.shadow_rate or not choice.swapped:
        return NotWatched("no call is sampled" if choice.swapped else "a baseline runs")
    reason = ""
    if is_random_program(region.program) or is_random_program(choice.candidate.program):
        reason = "it draws random numbers, and a second run would draw others"
    elif writes:
        reason = "the call writes to its inputs, and a second run would start from what the first one wrote"
    elif region.kind == "backward":
        reason = "a training backward frees what its forward saved while it runs"
    if reason:
        telemetry.record("shadow", "left_out", region.key, reason=reason)
        return NotWatched(reason)
    told = _Told(choice, place, _function(settings.on_mismatch))
    tolerance = _tolerance(choice, place)
    return lambda swapped, runner: _Shadowed(swapped, runner, settings.shadow_rate, tolerance, told)


class _Shadowed:
    """Stands where the kernel's callable stood."""

    def __init__(
        self, swapped: Swapped, runner: Runner, rate: float, tolerance: _Tolerance, told: _Told
    ) -> None:
        self._swapped, self._runner, self._rate, self._tolerance, self._told = (
            swapped,
            runner,
            rate,
            tolerance,
            told,
        )
        self._random = (
            random.Random()
        )  # its own: the user's sequence of random numbers is not touched
        self._left = self._gap()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        if self._swapped.quarantined:
            return self._swapped.reference(inputs)
        self._left -= 1
        return self._runner(inputs) if self._left > 0 else self._checked(inputs)

    def _gap(self) -> int:
        """Calls until the next sample: each is one with the same chance, so a fault that comes in
        turns is met too.
        """
        if self._rate >= 1:
            return 1
        return 1 + int(math.log(1.0 - self._random.random()) / math.log1p(-self._rate))

    def _checked(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        if any(tensor.is_cuda for tensor in inputs) and torch.cuda.is_current_stream_capturing():
            return self._runner(
                inputs
            )  # a comparison must wait for the GPU, which a capture forbids: the next call is sampled
        self._left = self._gap()
        try:  # first: a kernel that damages its inputs cannot spoil this
            expected = self._swapped.reference(inputs)
        except FAILURES as error:
            if is_sticky(error):
                raise
            telemetry.record(
                "shadow", "not_checked", self._told.key, reason=f"{type(error).__name__}: {error}"
            )
            return self._runner(inputs)
        results = self._runner(inputs)
        problem = _difference(results, expected, self._tolerance, partial(self._told.sway, inputs))
        telemetry.count("shadow_checks")
        if not problem:
            return results
        self._told.mismatch(problem)
        return expected


@dataclass(frozen=True)
class _Told:
    """Whom a mismatch is told: the process, the disk, the log, the user."""

    choice: Choice
    place: Place
    callback: Callable[[Any], object] | None

    @property
    def key(self) -> str:
        return self.choice.region.key

    def sway(self, inputs: Sequence[torch.Tensor], position: int) -> torch.Tensor | None:
        """How far an output moves with these inputs, asked where a difference was found: sums may
        have cancelled.
        """
        run = partial(exact_outputs, self.choice.region.program, device=self.place.device)
        exact = run(inputs)
        return None if isinstance(exact, Infeasible) else sway(run, inputs, exact)[position]

    def mismatch(self, problem: str) -> None:
        """Nothing of this candidate runs after this returns, here or in a later process."""
        digest, reason = self.choice.candidate.digest, f"a shadow check found it wrong: {problem}"
        withdraw(digest, f"quarantined: {reason}")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = Quarantined(
            self.key, digest, reason, now, f"{self.place.target.sku} ({self.place.target.arch})"
        )
        stored = hold_back(self.place.cache.root, record)
        facts = {
            "name": self.choice.region.name,
            "runs": self.choice.candidate.label,
            "candidate": digest,
            "reason": problem,
        }
        if isinstance(stored, NotStored):
            facts["not_stored"] = stored.reason
        event = telemetry.record("shadow", "mismatch", self.key, **facts)
        where = (
            f"not written down: {stored.reason}"
            if isinstance(stored, NotStored)
            else f"recorded in {stored.path}"
        )
        telemetry.log.error(
            "cudal1 quarantined %s of %s: %s; the baseline runs (%s)",
            facts["runs"],
            facts["name"] or self.key[:12],
            problem,
            where,
        )
        if self.callback is not None:
            try:
                self.callback(event)
            except Exception as error:  # noqa: BLE001  the user's own function, in the user's own call, which must not fail for it
                telemetry.record(
                    "shadow", "callback_failed", self.key, reason=f"{type(error).__name__}: {error}"
                )
                telemetry.log.exception("cudal1: on_mismatch raised")


def _difference(
    results: Sequence[Any],
    expected: Sequence[Any],
    tolerance: _Tolerance,
    sway: Callable[[int], torch.Tensor | None] = lambda position: None,
) -> str:
    """What is wrong with the first wrong output, "" if none is. What cannot be compared is not
    called wrong.
    """
    if len(results) != len(expected):
        return f"{len(results)} outputs, expected {len(expected)}"
    with torch.no_grad():
        for number, (ours, own) in enumerate(zip(results, expected, strict=True)):
            if ours is None or own is None:
                if ours is not own:
                    return f"output {number} is {'missing' if ours is None else 'there'}, and the baseline's is not"
                continue
            problem = _output_difference(ours, own, tolerance, partial(sway, number))
            if problem:
                return f"output {number}: {problem}"
    return ""


def _output_difference(
    ours: torch.Tensor,
    own: torch.Tensor,
    tolerance: _Tolerance,
    sway: Callable[[], torch.Tensor | None],
) -> str:
    found = compare(
        ours,
        own,
        None,
        precision=tolerance.precision,
        longest=tolerance.longest,
        drift=tolerance.drift,
        sway=sway,
    )
    if found.passed:
        return ""
    chosen = (
        not (own.dtype.is_floating_point or own.dtype.is_complex)
        and ours.shape == own.shape
        and ours.dtype == own.dtype
    )
    if (
        chosen
        and tolerance.rounded_choices
        and int((ours != own).sum()) <= max(1, _OTHER_CHOICES * own.numel())
    ):
        return ""
    return found.detail or "it differs from the baseline's"


def _tolerance(choice: Choice, place: Place) -> _Tolerance:
    """How far two right evaluations of a region may lie apart: its sums, its depth, and the
    coarsest format it rounds to.
    """
    program = choice.region.program
    steps = max(1, len(program.steps))
    dtypes = {spec.torch_dtype for spec in value_specs(program).values()}
    units = [unit_roundoff(dtype) for dtype in dtypes if dtype.is_floating_point]
    if place.device.type == "cuda" and place.contract.rights and _has_products(program):
        units.append(_TF32_ROUNDOFF)
    coarsest = max(units, default=0.0)
    drift = math.sqrt(steps) * coarsest if coarsest > unit_roundoff(torch.float32) else 0.0
    return _Tolerance(
        place.contract.precision, analyse(program).longest_reduction * steps, drift, bool(units)
    )


def _has_products(program: Program) -> bool:
    names = (step.target.split(".")[1] for step in program.steps if isinstance(step, Aten))
    return any(name.strip("_").endswith(_TENSOR_CORE_STEPS) for name in names)


def _function(named: Callable[[Any], object] | str | None) -> Callable[[Any], object] | None:
    """The callback that the setting names. Raises SettingError when there is none of that name."""
    if named is None or callable(named):
        return named
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            "on_mismatch", named, f"the name of a function that can be imported ({error})"
        ) from error
    if not callable(found):
        raise SettingError("on_mismatch", named, f"a function, it names a {type(found).__name__}")
    checked: Callable[[Any], object] = found
    return checked
