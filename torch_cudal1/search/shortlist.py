"""Which kernel of an island is fastest, where that can be asked of the island alone: of a matrix
product, whose time is its own.

A heat orders the kernels; who made them hears of it and may send one more generation, which has a
heat of its own. The fastest that is right is taken. What is put into a model is still asked of the
whole model: here only the choice among kernels is made, so nothing is judged for speed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from torch_cudal1 import judge
from torch_cudal1.core.report import per_call
from torch_cudal1.ir.records import Candidate, Region, Rejected
from torch_cudal1.judge.evaluate.prescreen import Heat, heat
from torch_cudal1.store.context import Place

__all__ = ["PROPOSALS", "RACED", "Breeder", "Fastest", "fastest_right", "rights_of"]

# families of which several kernels are timed
RACED = ("gemm", "conv", "attention", "attention_backward", "scan", "pooling")
_SURPRISING = 2.5  # as much faster as the judge asks for a second measurement, nearly
_APART = 5e-5  # rms: sums in another order differ by 1e-7 to 1e-5, TF32 and fp32 by 3e-4
PROPOSALS = 4  # of them: the bound that orders them is rough; each costs seconds of a compiler


class Breeder(Protocol):
    """Whoever made the kernels of a heat and may have more."""

    def heard(self, times_us: Sequence[tuple[Candidate, float | None]]) -> None:
        """What each kernel of a heat took; None where it did not run or was wrong."""

    def next_ones(self) -> Sequence[Candidate | Rejected]:
        """The next generation, built; () where nothing is hoped for or no time is left."""
        ...


class Fastest(NamedTuple):
    """The kernel that won, why those before it are not it, and microseconds a call that it saves of
    what it must beat.
    """

    kernel: Candidate | None
    reasons: list[Rejected]
    saved_us: float = 0.0


def rights_of(place: Place) -> tuple[str, ...]:
    """The op classes whose products may be as inexact as TF32's; none under "strict"."""
    return () if place.contract.precision == "strict" else place.contract.rights


def fastest_right(
    region: Region,
    answers: Sequence[Candidate | Rejected],
    place: Place,
    job: judge.Job,
    deadline: float,
    *,
    checked: bool = True,
    breeder: Breeder | None = None,
) -> Fastest:
    """The fastest of the built kernels that is fast enough and right.

    With `checked` False it is only not grossly wrong: for a region that is judged as a whole
    anyway.
    """
    reasons: list[Rejected] = []
    built = _admitted(answers, place, reasons)
    if built and judge.working_s() > deadline:
        return Fastest(None, [*reasons, Rejected("the budget was spent", "budget")])
    found = heat(region, built, job) if built else Heat(0.0, {}, {})
    if built and breeder is not None:
        breeder.heard(_times(built, found))
        later = _admitted(breeder.next_ones(), place, reasons)
        if later and judge.working_s() <= deadline:
            again = heat(region, later, job)
            breeder.heard(_times(later, again))
            found, built = _joined(found, again, len(built)), [*built, *later]
    for at in _by_speed(region, found, job, reasons):
        candidate, saved_us = built[at], found.to_beat_us - found.medians_us[at]
        if not checked:
            return Fastest(candidate, reasons, saved_us)
        verdict = judge.check(region, candidate, replace(job, examples=None, book={}))
        if verdict.passed:
            return Fastest(candidate, reasons, saved_us)
        failure = verdict.failure
        reasons.append(
            Rejected(
                failure.detail if failure else "no check ran", failure.name if failure else "judge"
            )
        )
    return Fastest(None, reasons)


def _admitted(
    answers: Sequence[Candidate | Rejected], place: Place, reasons: list[Rejected]
) -> list[Candidate]:
    """Those that were built and nobody revoked; why the others are not goes to `reasons`."""
    built: list[Candidate] = []
    for one in answers:
        if isinstance(one, Rejected):
            reasons.append(one)
        elif revoked := place.cache.revoked(one.program):
            reasons.append(Rejected(revoked, "revoked"))
        else:
            built.append(one)
    return built


def _times(ran: Sequence[Candidate], found: Heat) -> list[tuple[Candidate, float | None]]:
    return [(one, found.medians_us.get(at)) for at, one in enumerate(ran)]


def _by_speed(region: Region, found: Heat, job: judge.Job, reasons: list[Rejected]) -> list[int]:
    """Positions of those that beat eager and about what Inductor would take, fastest first; why
    others do not goes to `reasons`.

    Those whose results are apart from eager's as only another precision makes them come last:
    eager's convolutions use TF32 or not, as cuDNN has it, and a candidate is held to eager's error.
    """
    reasons += [Rejected(reason, "heat") for reason in found.failures.values()]
    order = sorted(found.medians_us, key=lambda at: found.medians_us[at])
    if order and found.medians_us[order[0]] * _SURPRISING <= found.eager_us:
        judge.begin(
            region, job
        )  # the judge will want to time the whole again, in a process that has run nothing
    slow = [at for at in order if found.medians_us[at] >= found.to_beat_us]
    than = f"eager {per_call(found.eager_us)}"
    than += (
        ""
        if found.one_pass_us is None
        else f", its product and one pass {per_call(found.one_pass_us)}"
    )
    reasons += [Rejected(f"takes {per_call(found.medians_us[at])}, {than}", "heat") for at in slow]
    return sorted(
        (at for at in order if at not in slow), key=lambda at: found.apart.get(at, 0.0) > _APART
    )


def _joined(first: Heat, second: Heat, count: int) -> Heat:
    """Two heats as one, the second's positions from `count` on; its times in units of its own
    eager, as clocks may have changed.
    """
    scale = first.eager_us / second.eager_us if second.eager_us else 1.0
    later = {at + count: us * scale for at, us in second.medians_us.items()}
    failures = {at + count: why for at, why in second.failures.items()}
    apart = {at + count: far for at, far in second.apart.items()}
    medians_us = {**first.medians_us, **later}
    return Heat(
        first.eager_us,
        medians_us,
        {**first.failures, **failures},
        {**first.apart, **apart},
        first.one_pass_us,
    )
