"""A source candidate against the clock: its process, and the oracle's with the baseline in it,
asked in turn by this one.

The samples are slopes on this process's clock (`judge.benchmark.cross_process`), because the
candidate's Python could patch every clock of its own; the outputs of timed calls are judged like
those of validation. Which baseline, and what follows from it, is
`judge.evaluate.source_evaluator`'s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from torch_cudal1.device.peaks import Work, ceiling, roofline
from torch_cudal1.ir.records import Check
from torch_cudal1.judge.benchmark.candidate_timing import (
    Audit,
    Timed,
    facts_of,
    stability,
    sync_checks,
    timing_state,
)
from torch_cudal1.judge.benchmark.cross_process import ChildSpinner, Duel, most_calls
from torch_cudal1.judge.benchmark.protocol import Measurement, Pairs, measure
from torch_cudal1.judge.benchmark.same_core import SameCore, same_core
from torch_cudal1.judge.benchmark.timing import L2, Batch, Warm
from torch_cudal1.judge.checks.profiles import TimingPlan
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = ["first_call", "time_pair"]

_AGAIN = "first_call"
# Where disagreement widens the interval and refuses nobody, the clock must not take what a
# candidate may take in all (3 s on a GPU, 10 on a CPU): a second round comes only where both fit
# in, and past this time a bucket has one pair.
_ROUNDS = 2
_WIDEN_S = {"cuda": 1.6, "cpu": 5.0}


@dataclass
class _Audited:
    """A duel as a `Sampler`, one output of each bucket's last batch judged."""

    duel: Duel
    spinner: ChildSpinner
    audit: Audit
    core: SameCore | None = None
    temperatures: tuple[L2, ...] = field(default=("hot",))

    def warm(self) -> tuple[Warm, Warm]:
        """Settle both sides. Raises CandidateFailure."""
        self._move()
        return self.duel.warm()

    def bucket(self, batch: Batch) -> Pairs:
        """Samples of a batch; then one of its calls is judged. Raises CandidateFailure."""
        self.spinner.shift = self.audit.shift()
        if self._move():
            self.duel.settle()
        pairs = self.duel.bucket(batch)
        self.audit.look(self.spinner.start, self.spinner.shift, self.spinner.kept)
        return pairs

    def _move(self) -> bool:
        return self.core is not None and self.core.move()


def time_pair(trial: Trial, baseline: ChildSpinner, plan: TimingPlan) -> Timed:
    """Measure slot "candidate" of the trial's child against a slot of another child, on input sets
    drawn now.

    Raises CandidateFailure.
    """
    trial.let_go()
    fresh = replace(trial, samples={}, results={}, book={})
    for _ in range(2):
        fresh.draw("normal")
    audit = Audit(fresh, plan)  # as many outputs are looked at, however short the race
    if plan.gate == "widen":
        seconds = min(plan.budget_s, _WIDEN_S[trial.device.type])
        plan = replace(plan, rounds=min(plan.rounds, _ROUNDS), budget_s=seconds)
    spinner = ChildSpinner(
        trial.child, "candidate", audit.sets, most_calls(audit.output_bytes, trial.device)
    )
    # What a batch keeps costs memory that a discarded result does not: both sides pay it.
    duel = Duel(replace(baseline, keep=True, most_calls=spinner.most_calls), spinner)
    started = time.monotonic()
    with _one_core(baseline, spinner, trial.device) as core:
        try:
            found = measure(_Audited(duel, spinner, audit, core), plan)
        except ValueError as error:
            raise CandidateFailure("timing", f"unusable samples: {error}", "protocol") from error
        facts = facts_of(found) | {"one_core": core is not None and core.shared}
    written = Work(0.0, 4, audit.output_bytes)  # of a source only the results are known
    bound = roofline(written, ceiling(trial.device), found.summary.b_us)
    checks = [
        audit.check(),
        duel.check(),
        first_call(trial, found, audit.sets),
        *stability(found),
        bound,
    ]
    if trial.device.type == "cuda":
        checks += sync_checks(trial.child.call("look", slot="candidate", sets=audit.sets))
    fresh.drop(*list(fresh.samples.values()))
    return Timed(found, tuple(checks), facts | {"seconds": time.monotonic() - started})


def _one_core(
    a: ChildSpinner, b: ChildSpinner, device: torch.device
) -> AbstractContextManager[SameCore | None]:
    """The hosts of a GPU on one core; what runs on the cores themselves needs all of them."""
    return same_core((a.child.pid, b.child.pid)) if device.type == "cuda" else nullcontext()


def first_call(trial: Trial, found: Measurement, sets: Sequence[str]) -> Check:
    """`timing_state`. A first call that took too long is not held against a candidate whose next
    instance starts fast.

    A kernel that was compiled stays in the process; work that each new instance does in its first
    call comes again. Raises CandidateFailure.
    """
    check = timing_state(found)
    if check.passed:
        return check
    trial.load(_AGAIN, trial.candidate)
    again_us = ChildSpinner(trial.child, _AGAIN, sets, 1, keep=False).spin(1).wall_s * 1e6
    trial.child.call("forget", slot=_AGAIN)
    return timing_state(
        replace(
            found, first_call_us=(found.first_call_us[0], min(again_us, found.first_call_us[1]))
        )
    )
