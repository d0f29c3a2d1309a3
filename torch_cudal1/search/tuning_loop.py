"""The tuning loop: asks a strategy for candidates and evaluates them until they or the budget run
out.

        strategy.propose ──> declined? ──no──> judge ──> strategy.observe ─┐
               ^  └─yes──> recorded as tried                               │
               └───────────────────────────────────────────────────────────┘

What an entry stores of every candidate (`tried`) is recorded here. Nothing is stored or swapped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_cudal1 import judge
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.report import per_call
from torch_cudal1.ir.cost import estimate_launch_us
from torch_cudal1.ir.records import Candidate, Entry, Region, Rejected, Verdict
from torch_cudal1.ir.schedule import Schedule
from torch_cudal1.search.new_entry import make_entry
from torch_cudal1.search.reuse import UNTRUSTED_ORIGIN, check_quarantine
from torch_cudal1.search.schedules import estimate_copy_us
from torch_cudal1.search.strategy import Attempt, SearchStrategy
from torch_cudal1.store.context import TuneContext

if TYPE_CHECKING:
    from torch_cudal1.search.tune import Progress

__all__ = ["TuningSession", "run_tuning_loop"]

# of the longest evaluation so far must be left of the budget for another one to begin
# On a busy machine a second evaluation doubled a search before this was asked.
_MIN_TIME_LEFT_FRACTION = 0.5
# after the end of the budget: what is sure to be compiling still, then, does not begin
_MAX_OVERRUN_S = 15.0
# of the lower bound on the region's time: what is left to gain below is not worth an evaluation
_NEAR_LOWER_BOUND_RATIO = 1.1
# of a candidate's time: launches that take no more cannot make its CUDA graph 5 % faster
_MAX_LAUNCH_SHARE = 0.05


@dataclass(frozen=True)
class TuningSession:
    """What the candidates of one region are measured against, and until when.

    `deadline`: on the clock of `judge.working_s`. `lower_bound_us`: the least that the region can
    take on its device, or 0.0 where that is not known.
    """

    region: Region
    place: TuneContext
    strategy: SearchStrategy
    ranking: judge.BaselineRanking
    job: judge.EvaluationConfig
    deadline: float
    report_progress: Progress
    lower_bound_us: float = 0.0

    def check_lower_bound(self) -> Refusal | None:
        """Why nothing more can be gained: the best is near what the device can do at all."""
        best_us = self.strategy.history.best_us
        # Before there is a winner a candidate has to beat the baseline by the margin, which the
        # bound may rule out.
        ratio = _NEAR_LOWER_BOUND_RATIO if best_us is not None else self.place.settings.margin
        if best_us is None:
            best_us = min(self.ranking.medians_us.values(), default=math.inf)
        if best_us > ratio * self.lower_bound_us:
            return None
        return Refusal(
            f"{per_call(best_us)}; the device needs at least {per_call(self.lower_bound_us)}"
        )

    def check_launch_gain(self, candidate: Candidate) -> Refusal | None:
        """Why `candidate` cannot win by 5 %: the best is the same Program with or without a CUDA
        graph, and what only the best one does, launching or copying, is less than that of its time.
        """
        best = self.strategy.history.best
        if best is None or best.timing is None:
            return None
        # Another Program may be faster for other reasons.
        if best.candidate.program.digest != candidate.program.digest:
            return None
        # The part before "+" is the schedule's base.
        if best.candidate.schedule.partition("+")[0] != candidate.schedule.partition("+")[0]:
            return None
        best_us = best.timing.candidate_us
        # A graph saves launches and copies inputs and results; without it, it is the other way.
        saved_us, purpose = (
            (estimate_copy_us(self.region), "copy for it")
            if best.candidate.schedule.cuda_graph
            else (estimate_launch_us(best.candidate.program), "launch it")
        )
        if saved_us > _MAX_LAUNCH_SHARE * best_us:
            return None
        return Refusal(
            f"{best.candidate.label} takes {per_call(best_us)}, "
            f"about {per_call(saved_us)} of it to {purpose}"
        )

    def check_budget(self, schedule: Schedule) -> Refusal | None:
        """Why no further evaluation begins, or None. An evaluation that has begun is finished, so
        it should end near the end of the budget.

        On a busy machine the longest evaluation so far says what the next may take. Compiling the
        baseline under the same schedule says what compiling the candidate will take: for a network
        of 200 layers that alone is over a minute.
        """
        left_s = self.deadline - judge.working_s()
        longest_s = self.strategy.history.longest_s
        # A candidate compiles about as much as the baseline under the same schedule.
        compile_s = self.ranking.estimate_compile_s(schedule)
        if left_s <= 0:
            return Refusal("the budget was spent")
        if left_s < _MIN_TIME_LEFT_FRACTION * longest_s:
            return Refusal(
                f"{left_s:.1f} s of the budget were left, "
                f"and a judgement has taken {longest_s:.1f} s"
            )
        if compile_s - left_s > _MAX_OVERRUN_S:
            return Refusal(
                f"{left_s:.1f} s of the budget were left, "
                f"and compiling the baseline has taken {compile_s:.1f} s"
            )
        return None


def run_tuning_loop(session: TuningSession) -> Entry:
    """Evaluate the strategy's candidates until they or the budget run out, or nothing more can be
    gained; the entry of the best.
    """
    strategy = session.strategy
    tried: list[Mapping[str, Any]] = []
    while True:
        # before the next candidate is made: compiling its kernels takes longest
        if (refusal := session.check_lower_bound()) is not None:
            tried.append(
                {
                    "label": "whatever else there is",
                    "decision": "not judged",
                    "reason": refusal.reason,
                }
            )
            break
        # May take as long as compiling kernels does.
        candidate = strategy.propose()
        if candidate is None:
            break
        if (record := _record_declined(session, candidate)) is not None:
            # Declined candidates are recorded too: an entry shows everything that was looked at.
            tried.append(record)
            continue
        assert isinstance(candidate, Candidate)
        attempt = _evaluate(session, candidate)
        # Before `observe`: what a strategy does with the result does not change the record.
        tried.append(judge.summarise_evaluation(attempt.evaluation))
        strategy.observe(attempt)
    session.report_progress("decided", 1.0)
    best = strategy.history.best
    return make_entry(
        session.region,
        session.place,
        # Without an accepted candidate the fastest baseline is the choice.
        best.candidate if best is not None else session.ranking.best,
        evaluation=best.evaluation if best is not None else None,
        ranking=session.ranking,
        tried=tried,
    )


def _record_declined(
    session: TuningSession, candidate: Candidate | Rejected
) -> Mapping[str, Any] | None:
    """What an entry stores of a candidate that is not evaluated, None of one that is."""
    if isinstance(candidate, Rejected):
        return {"label": candidate.detector, "decision": "rejected", "reason": candidate.reason}
    place = session.place
    # Before the judge: a kernel that production found wrong passed its checks once.
    if (quarantined := check_quarantine(place, session.region, candidate)) is not None:
        return _record_rejected(candidate, "quarantine", quarantined.reason)
    if (revoked := place.cache.check_revoked(candidate.program)) is not None:
        return _record_rejected(candidate, "revoked", revoked.reason)
    # Last, so that a wrong candidate is named so and not put down to time.
    refusal = session.check_launch_gain(candidate) or session.check_budget(candidate.schedule)
    if refusal is None:
        return None
    return {"label": candidate.label, "decision": "not judged", "reason": refusal.reason}


def _record_rejected(candidate: Candidate, detector: str, reason: str) -> Mapping[str, Any]:
    return {
        "label": candidate.label,
        "decision": "rejected",
        "detector": detector,
        "reason": reason,
    }


def _evaluate(session: TuningSession, candidate: Candidate) -> Attempt:
    started_s = judge.working_s()
    # A budget of 0 s is allowed.
    left = (session.deadline - started_s) / max(session.place.settings.budget_s, 1e-9)
    session.report_progress(f"judging {candidate.label}", min(1.0, 1 - left))
    evaluation = _judge_confined(session, candidate)
    return Attempt(evaluation, judge.working_s() - started_s)


def _judge_confined(session: TuningSession, candidate: Candidate) -> judge.Evaluation:
    """Judge a candidate. One of untrusted origin runs confined as such, and is rejected where
    that confinement cannot be had.
    """
    region, ranking, job = session.region, session.ranking, session.job
    # Origin is set by `list_cached_candidates`, not by the entry.
    if candidate.origin != UNTRUSTED_ORIGIN:
        return judge.evaluate_candidate(region, candidate, ranking, job)
    try:
        return judge.evaluate_candidate(region, candidate, ranking, replace(job, trust="foreign"))
    except SandboxError as error:  # this package's own candidates are judged all the same
        return judge.Evaluation(candidate, Rejected(str(error), "sandbox"), Verdict(()))
