"""Selects a fusion group's kernel by timing a shortlist of them, for families whose time alone is
their time inside a model: matrix products, convolutions and the like.

A prescreen times the kernels side by side. A generator that knows their times may build one more
generation, which is timed like the first. The fastest correct kernel is taken. Whether it pays is
still measured in the whole model: here only the choice among kernels is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch_cudal1 import judge
from torch_cudal1.core.report import per_call
from torch_cudal1.ir.records import Candidate, Region, Rejected, Verdict
from torch_cudal1.judge.evaluate.prescreen import PrescreenResult, prescreen
from torch_cudal1.search.attention_choice import choose_attention
from torch_cudal1.store.context import TuneContext

__all__ = [
    "PROPOSALS_PER_GROUP",
    "CandidateGenerator",
    "ShortlistResult",
    "list_tf32_rights",
    "reject_for_failure",
    "select_fastest_correct",
]

# The bound that orders proposals is rough, and each costs half a second of a compiler and a fifth of
# one of the GPU.
PROPOSALS_PER_GROUP = 6
# nearly the speed-up from which the judge asks for a second measurement
_REMEASURED_RATIO = 2.5
# root mean square, relative: sums in another order differ by 1e-7 to 1e-5, TF32 and fp32 by 3e-4
_MAX_SAME_PRECISION_ERROR = 5e-5


class CandidateGenerator(Protocol):
    """Makes kernels for a fusion group, and more of them once their times are known."""

    def record_times(self, times_us: Sequence[tuple[Candidate, float | None]]) -> None:
        """Learn the microseconds of each kernel; None where it did not run or was wrong."""

    def build_next_generation(self) -> Sequence[Candidate | Rejected]:
        """More kernels, built; () where the cost model expects no gain or no time is left."""
        ...


class ShortlistResult(NamedTuple):
    """The fastest correct kernel, why faster ones were rejected, and the microseconds of a call
    that it saves of what it must beat.
    """

    kernel: Candidate | None
    reasons: list[Rejected]
    saved_us: float = 0.0


def list_tf32_rights(place: TuneContext) -> tuple[str, ...]:
    """The op classes whose products may be as inexact as TF32's; none under "strict"."""
    # Under "strict" fp32 stays fp32, whatever PyTorch's switches allow.
    return () if place.contract.precision == "strict" else place.contract.rights


def select_fastest_correct(
    region: Region,
    answers: Sequence[Candidate | Rejected],
    place: TuneContext,
    job: judge.EvaluationConfig,
    deadline: float,
    *,
    check: bool = True,
    generator: CandidateGenerator | None = None,
) -> ShortlistResult:
    """The fastest of the built kernels that beats what it has to, and is correct.

    With `check` False the kernel is only known to be roughly right, from the prescreen: the caller
    validates the whole region anyway.
    """
    reasons: list[Rejected] = []
    built = _select_built(answers, place, reasons)
    # Compiling may have taken all of the time.
    if built and judge.working_s() > deadline:
        return ShortlistResult(None, [*reasons, Rejected("the budget was spent", "budget")])
    # One process for all: side by side they see the same clocks.
    times, eager = PrescreenResult(0.0, {}, {}), region.program
    if built:
        # A kernel of attention takes the place of the fastest library's, not of PyTorch's choice.
        eager = choose_attention(region.program, job.device).program
        times = prescreen(region, built, job, eager)
    if built and generator is not None:
        # Before the next generation, whose model learns from them.
        generator.record_times(_pair_times(built, times))
        # Children are checked for revocation as their parents are.
        children = _select_built(generator.build_next_generation(), place, reasons)
        if children and judge.working_s() <= deadline:
            child_times = prescreen(region, children, job, eager)
            generator.record_times(_pair_times(children, child_times))
            # Positions of children follow those of their parents in `built`.
            times = _join_times(times, child_times, len(built))
            built = [*built, *children]
    # Fastest first, so that the first correct one ends the checks.
    for position in _order_by_speed(region, times, job, reasons):
        candidate = built[position]
        saved_us = times.to_beat_us - times.medians_us[position]
        # The whole region is judged later, with this kernel in it.
        if not check:
            return ShortlistResult(candidate, reasons, saved_us)
        verdict = judge.validate_candidate(
            region, candidate, replace(job, examples=None, reference_cache={})
        )
        if verdict.passed:
            return ShortlistResult(candidate, reasons, saved_us)
        reasons.append(reject_for_failure(verdict))
    return ShortlistResult(None, reasons)


def reject_for_failure(verdict: Verdict) -> Rejected:
    """The rejection of a kernel whose verdict is not passed."""
    failure = verdict.failure
    if failure is None:
        return Rejected("no check ran", "judge")
    return Rejected(failure.detail, failure.name)


def _select_built(
    answers: Sequence[Candidate | Rejected], place: TuneContext, reasons: list[Rejected]
) -> list[Candidate]:
    """The kernels that were built and are not revoked; why others are not goes to `reasons`."""
    built: list[Candidate] = []
    for answer in answers:
        if isinstance(answer, Rejected):
            reasons.append(answer)
        # A build from the cache may be older than its revocation.
        elif revoked := place.cache.check_revoked(answer.program):
            reasons.append(Rejected(str(revoked), "revoked"))
        else:
            built.append(answer)
    return built


def _pair_times(
    candidates: Sequence[Candidate], times: PrescreenResult
) -> list[tuple[Candidate, float | None]]:
    return [
        (candidate, times.medians_us.get(position)) for position, candidate in enumerate(candidates)
    ]


def _order_by_speed(
    region: Region, times: PrescreenResult, job: judge.EvaluationConfig, reasons: list[Rejected]
) -> list[int]:
    """Positions of the kernels that beat eager and about what Inductor would take, fastest first;
    why others do not goes to `reasons`.

    Kernels whose results differ from eager's as only another precision makes them come last:
    eager's convolutions use TF32 or not, as cuDNN has it, and a candidate is held to eager's error.
    """
    # "heat" is the name under which entries store this stage
    reasons += [Rejected(reason, "heat") for reason in times.failures.values()]
    medians_us = times.medians_us
    # Failed kernels have no time, so they are not among these.
    order = sorted(medians_us, key=lambda position: medians_us[position])
    if order and medians_us[order[0]] * _REMEASURED_RATIO <= times.eager_us:
        # the judge will want to time the whole region again, in a process that has run nothing
        judge.prestart_worker(region, job)
    # Eager takes a pass for each element-wise step, Inductor one for all: VGG's plan with four
    # kernels that beat only eager was 0.79x.
    slow = [position for position in order if medians_us[position] >= times.to_beat_us]
    compared = f"eager {per_call(times.eager_us)}"
    if times.one_pass_us is not None:
        compared += f", its product and one pass {per_call(times.one_pass_us)}"
    reasons += [
        Rejected(f"takes {per_call(medians_us[position])}, {compared}", "heat") for position in slow
    ]
    return sorted(
        (position for position in order if position not in slow),
        key=lambda position: times.errors.get(position, 0.0) > _MAX_SAME_PRECISION_ERROR,
    )


def _join_times(first: PrescreenResult, second: PrescreenResult, count: int) -> PrescreenResult:
    """Two measurements as one, the second's positions from `count` on. Its times are scaled to the
    first one's eager time, as clocks may have changed in between.
    """
    # Eager is in both measurements, so it tells how the clocks moved.
    scale = first.eager_us / second.eager_us if second.eager_us else 1.0
    medians_us = {position + count: us * scale for position, us in second.medians_us.items()}
    failures = {position + count: reason for position, reason in second.failures.items()}
    errors = {position + count: error for position, error in second.errors.items()}
    return PrescreenResult(
        first.eager_us,
        {**first.medians_us, **medians_us},
        {**first.failures, **failures},
        {**first.errors, **errors},
        # What is to be beaten stays that of the first measurement, to which all times are scaled.
        first.one_pass_us,
    )
