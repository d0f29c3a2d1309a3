"""A short race of two processes for rewards: each side times its own batches, this process's clock
then says whether to believe it.

`judge.benchmark.cross_process` reads only the parent's clock, so every sample must drown the jitter
of a request: over a second for one candidate, which is too long where thousands are measured. Here
a sample is as short as the timing plan says, read by the C++ clock in the child, or off the GPU's
own where `baseline.queued` asks for that; and one slope on the parent's clock at the end must tell
the same time per call as the child's wall clock (`wall_slope`). A candidate that lies about time by
under 10 % gets by: a reward may hold that, a decision to swap may not, so nothing but training uses
this.

Whoever races wants the device alone, and all others wait for it. So nothing is done then that can
be done beside others: before it rings are made and calls are warmed (`begun`), after it, where both
sides are ours, outputs of timed calls are judged and clocks compared (`Ready.examined`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch_cudal1.device.peaks import Work, ceiling, roofline
from torch_cudal1.ir.records import Check
from torch_cudal1.judge.benchmark.candidate_timing import (
    Audit,
    Timed,
    facts_of,
    stability,
    sync_checks,
)
from torch_cudal1.judge.benchmark.cross_process import ChildSpinner, most_calls, slope, wall_slope
from torch_cudal1.judge.benchmark.protocol import Pairs, measure
from torch_cudal1.judge.benchmark.source_timing import first_call
from torch_cudal1.judge.benchmark.timing import L2, Batch, Warm, leading
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.checks.profiles import BUCKETS, TimingPlan
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = ["CLOCKS", "Race", "Ready", "begun"]

CLOCKS = ("wall_slope", "sync_ratio")  # checks that others on the device can disturb

_LOOKS = 2  # of seven buckets
_WARM_CALLS = 3
# as many as batches of queued calls have: memory for what they keep is there before the race, to
# grow takes 20 ms
_GROWN_CALLS = 8
_KEPT_BYTES = 1 << 30  # results of one batch: many lanes share the device's memory
_WARM_US, _WARM_QUEUED_US = 1_000.0, 150.0  # a batch this long says what a call costs
_SPARE = 1.25  # a first guess this much longer is seldom too short
_SLOPE_US = 4_000.0
_LAUNCH_US = 50.0  # of the host, which a queued race does not measure
_SLOPES = (
    1,
    3,
    5,
    9,
)  # of each try; batches twice as long each time, as far as what they keep allows


@dataclass
class Race:
    """Two spinners as a `Sampler`, baseline first, each on its own process's clock, or slots of one
    child, which takes all buckets at one request. `audit` looks at outputs of timed calls.

    Every batch keeps its outputs, so that none can be left out; which few are looked at is drawn
    here. `settled`: what `settle` learned of each side before the device was this race's alone.
    """

    baseline: ChildSpinner
    candidate: ChildSpinner
    audit: Audit
    temperatures: tuple[L2, ...] = field(default=("hot",))
    looked: set[int] = field(
        default_factory=lambda: set(random.SystemRandom().sample(range(BUCKETS), _LOOKS))
    )
    warmed: tuple[Warm, Warm] | None = None
    settled: tuple[_Settled, _Settled] | None = None
    _bucket: int = 0
    _ahead: Pairs = field(default_factory=list)

    @property
    def together(self) -> bool:
        """Whether both sides are slots of one child, and so both are ours."""
        return self.baseline.child is self.candidate.child

    def anew(self) -> Race:
        """Another race of the same two, which are warm: other outputs are looked at, at least one
        of its own.
        """
        audit = replace(self.audit, judged=0, spent_s=0.0)
        return Race(
            self.baseline,
            self.candidate,
            audit,
            self.temperatures,
            settled=self.settled,
            warmed=self.warmed,
        )

    def settle(self) -> tuple[_Settled, _Settled]:
        """Let both sides make their rings of inputs and have their first calls, beside whoever else
        is there.

        Raises CandidateFailure.
        """
        self.settled = _settled(self.baseline), _settled(self.candidate)
        return self.settled

    def warm(self) -> tuple[Warm, Warm]:
        """Batches of growing length, in the first race of the two. Raises CandidateFailure."""
        if self.warmed is None:
            a, b = self.settled or self.settle()
            self.warmed = _warm(self.baseline, a), _warm(self.candidate, b)
        return self.warmed

    def bucket(self, batch: Batch) -> Pairs:
        """Pairs of batches, A B B A or B A A B; of some buckets one output is judged, but where
        both sides are in one child, whose last outputs are judged after the race (`look`). Raises
        CandidateFailure.
        """
        if self.together:
            return self._together(batch)
        self.candidate.shift = self.audit.shift()
        pairs = self._apart(leading(batch), batch)
        if self._bucket in self.looked:
            self._look()
        self._bucket += 1
        return pairs

    def look(self) -> None:
        """Judge some outputs of the last batch, which came after most calls. Raises
        CandidateFailure.
        """
        for _ in range(_LOOKS):
            self._look()

    def _look(self) -> None:
        self.audit.look(self.candidate.start, self.candidate.shift, self.candidate.kept)

    def _apart(self, leads: Sequence[int], batch: Batch) -> Pairs:
        pairs: Pairs = []
        for first in leads:
            costs = {side: self._cost(side, batch.calls[side]) for side in (first, 1 - first)}
            pairs.append((costs[0], costs[1]))
        return pairs

    def _together(self, batch: Batch) -> Pairs:
        """A bucket of the pairs that one request has taken for all of them: everybody waits for
        each request.
        """
        if len(self._ahead) < batch.pairs:
            self.candidate.shift = self.audit.shift()
            self._ahead = self._asked(
                [lead for _ in range(BUCKETS) for lead in leading(batch)], batch
            )
        pairs, self._ahead = self._ahead[: batch.pairs], self._ahead[batch.pairs :]
        return pairs

    def _asked(self, leads: Sequence[int], batch: Batch) -> Pairs:
        one = self.candidate
        calls = [min(count, one.most_calls) for count in batch.calls]
        begin = time.monotonic()
        answer = one.child.call(
            "pairs",
            slots=[self.baseline.slot, one.slot],
            sets=list(one.sets),
            shift=one.shift,
            calls=calls,
            leads=list(leads),
            queued=one.queued,
        )
        wall_us = (time.monotonic() - begin) * 1e6
        pairs = [(float(a), float(b)) for a, b in answer["pairs"]]
        told_us = sum(a * calls[0] + b * calls[1] for a, b in pairs)
        if (
            len(pairs) != len(leads)
            or not all(min(pair) > 0 for pair in pairs)
            or told_us > wall_us
        ):
            raise CandidateFailure(
                "timing",
                f"{pairs[:BUCKETS]} told of a request that took {wall_us:.0f} us",
                "wall_slope",
            )
        one.start, one.kept = int(answer["start"]), calls[1]
        return pairs

    def _cost(self, side: int, calls: int) -> float:
        spinner = (self.baseline, self.candidate)[side]
        spun = spinner.spin(min(calls, spinner.most_calls))
        if not 0 < spun.claimed_us <= spun.wall_s * 1e6:
            found = f"{spun.claimed_us} us told of a request that took {spun.wall_s * 1e6:.0f}"
            raise CandidateFailure("timing", found, "wall_slope")
        return spun.claimed_us / spun.calls


@dataclass
class Ready:
    """Two sides that have begun, to be measured as often as somebody wants. `beside`: what was
    measured is to be examined after that, beside others; else that is part of measuring it.
    """

    race: Race
    trial: Trial
    plan: TimingPlan

    @property
    def beside(self) -> bool:
        """Whether both sides are ours."""
        return self.race.together

    def measured(self) -> Timed:
        """One measurement, for which the device must be this one's alone. Whoever is not content
        with it asks again: only the race itself is run once more. Raises CandidateFailure.
        """
        started = time.monotonic()
        self.race = race = self.race.anew()
        try:
            found = measure(race, self.plan)
        except ValueError as error:
            raise CandidateFailure("timing", f"unusable samples: {error}", "protocol") from error
        bound = roofline(
            Work(0.0, 4, race.audit.output_bytes), ceiling(self.trial.device), found.summary.b_us
        )
        checks = [first_call(self.trial, found, race.audit.sets), *stability(found), bound]
        timed = Timed(
            found, tuple(checks), facts_of(found) | {"seconds": time.monotonic() - started}
        )
        return timed if self.beside else self.examined(timed)

    def examined(self, timed: Timed) -> Timed:
        """The last measurement with what can be asked beside others: were outputs of timed calls
        right, does the process's clock tell the truth, are all streams joined. Raises
        CandidateFailure.
        """
        if self.beside:
            self.race.look()
        return replace(timed, checks=(*timed.checks, self.race.audit.check(), *self._clocks(timed)))

    def heard_again(self, timed: Timed) -> Timed:
        """What was examined, its clocks compared anew: for a moment without others, who may have
        disturbed them.
        """
        kept = [check for check in timed.checks if check.name not in CLOCKS]
        return replace(timed, checks=(*kept, *self._clocks(timed)))

    def _clocks(self, timed: Timed) -> list[Check]:
        one, checks = (
            self.race.candidate,
            [_believed(self.race.candidate, timed.measurement.summary.b_us)],
        )
        if self.trial.device.type == "cuda":
            checks += sync_checks(one.child.call("look", slot=one.slot, sets=self.race.audit.sets))
        return checks


def begun(trial: Trial, baseline: ChildSpinner, plan: TimingPlan) -> Ready:
    """Draw the inputs for slot "candidate" of the trial's child and a slot of another child (or of
    this one, where both are ours), and let both begin. What the outputs are to be is known by then,
    so that others are not kept off the device meanwhile.

    Raises CandidateFailure.
    """
    fresh = replace(trial, samples={}, results={}, book={})
    for _ in range(2):
        fresh.draw("normal")
    audit = Audit(fresh, plan)
    calls = min(
        most_calls(audit.output_bytes, trial.device),
        max(2, _KEPT_BYTES // max(1, audit.output_bytes)),
    )
    spinner = ChildSpinner(
        trial.child, "candidate", audit.sets, calls, inline=True, queued=baseline.queued
    )
    other = replace(
        baseline, keep=True, most_calls=spinner.most_calls, inline=True
    )  # what is kept costs memory: both sides pay
    if baseline.child is trial.child:
        other.sets = audit.sets
    race = Race(other, spinner, audit)
    race.settle()
    _foresee(fresh)
    return Ready(race, fresh, plan)


def _foresee(trial: Trial) -> None:
    """Have both sets' results computed: both keep them."""
    for sample in first_two(trial):
        _ = sample.reference
        if trial.contract.precision != "kernelbench":
            _ = sample.exact


def _believed(spinner: ChildSpinner, cost_us: float) -> Check:
    """`wall_slope`: noise passes on a later try, with longer batches and the median of more of
    them; a false clock on none.
    """
    apart = replace(spinner, inline=False, queued=False)
    if spinner.queued:
        cost_us = max(cost_us, _LAUNCH_US)
    for attempt, count in enumerate(_SLOPES):
        slopes = [slope(apart, math.ceil(_SLOPE_US / cost_us) << attempt) for _ in range(count)]
        answer = wall_slope(slopes)
        if answer.passed:
            break
    return answer


@dataclass(frozen=True)
class _Settled:
    """Microseconds of a side's first call, and of one of a few later ones, by its own clock and
    beside others.
    """

    first_us: float
    later_us: float


def _settled(spinner: ChildSpinner) -> _Settled:
    first_us = spinner.spin(1).wall_s * 1e6
    later = spinner.spin(min(_GROWN_CALLS if spinner.queued else _WARM_CALLS, spinner.most_calls))
    return _Settled(first_us, later.claimed_us / later.calls)


def _warm(spinner: ChildSpinner, settled: _Settled) -> Warm:
    """What a call costs, from a batch that is long enough: one request, where the guess was right."""
    wanted_us = _WARM_QUEUED_US if spinner.queued else _WARM_US
    calls = max(
        1, min(spinner.most_calls, math.ceil(_SPARE * wanted_us / max(settled.later_us, 0.1)))
    )
    while True:
        spun = spinner.spin(calls)
        cost_us = spun.claimed_us / calls
        if spun.claimed_us >= wanted_us or 2 * calls > spinner.most_calls:
            return Warm(settled.first_us, cost_us, cost_us)
        calls *= 2
