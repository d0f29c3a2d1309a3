"""Which kernel of an island is fastest, where that can be asked of the island alone: of a matrix product, whose time is its own.

A heat orders the kernels; the fastest that is right is taken. What is put into a model is still asked of the whole model: here only
the choice among kernels is made, so nothing is judged for speed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch_cudal1 import judge
from torch_cudal1.judge.heat import heat
from torch_cudal1.place import Place
from torch_cudal1.records import Candidate, Region, Rejected

__all__ = ["PROPOSALS", "RACED", "fastest_right", "rights_of"]

# families of which several kernels are timed
RACED = ("gemm", "conv", "attention", "scan", "pooling")
_SURPRISING = 2.5  # as much faster as the judge asks for a second measurement, nearly
_APART = 5e-5  # rms: sums in another order differ by 1e-7 to 1e-5, TF32 and fp32 by 3e-4
PROPOSALS = 4  # of them: the bound that orders them is rough; each costs seconds of a compiler


def rights_of(place: Place) -> tuple[str, ...]:
    """The op classes whose products may be as inexact as TF32's; none under "strict"."""
    return () if place.contract.precision == "strict" else place.contract.rights


def fastest_right(
    region: Region, answers: Sequence[Candidate | Rejected], place: Place, job: judge.Job, deadline: float, *, checked: bool = True
) -> tuple[Candidate | None, list[Rejected]]:
    """The fastest of the built kernels that beats eager and is right, and why those before it are not it.

    With `checked` False it is only not grossly wrong: for a region that is judged as a whole anyway.
    """
    reasons: list[Rejected] = []
    built: list[Candidate] = []
    for one in answers:
        if isinstance(one, Rejected):
            reasons.append(one)
        elif revoked := place.cache.revoked(one.program):
            reasons.append(Rejected(revoked, "revoked"))
        else:
            built.append(one)
    if built and judge.working_s() > deadline:
        return None, [*reasons, Rejected("the budget was spent", "budget")]
    for candidate in _by_speed(region, built, job, reasons):
        if not checked:
            return candidate, reasons
        verdict = judge.check(region, candidate, replace(job, examples=None, book={}))
        if verdict.passed:
            return candidate, reasons
        failure = verdict.failure
        reasons.append(Rejected(failure.detail if failure else "no check ran", failure.name if failure else "judge"))
    return None, reasons


def _by_speed(region: Region, built: Sequence[Candidate], job: judge.Job, reasons: list[Rejected]) -> list[Candidate]:
    """Those that beat eager, fastest first; why the others do not goes to `reasons`.

    Those whose results are apart from eager's as only another precision makes them come last: eager's convolutions use TF32 or not,
    as cuDNN has it, and a candidate is held to eager's error.
    """
    if not built:
        return []
    found = heat(region, built, job)
    reasons += [Rejected(reason, "heat") for reason in found.failures.values()]
    order = sorted(found.medians_us, key=lambda at: found.medians_us[at])
    if order and found.medians_us[order[0]] * _SURPRISING <= found.eager_us:
        judge.begin(region, job)  # the judge will want to time the whole again, in a process that has run nothing
    slow = [at for at in order if found.medians_us[at] >= found.eager_us]
    reasons += [Rejected(f"takes {found.medians_us[at]:.1f} us, eager {found.eager_us:.1f} us", "heat") for at in slow]
    return [built[at] for at in sorted((at for at in order if at not in slow), key=lambda at: found.apart.get(at, 0.0) > _APART)]
