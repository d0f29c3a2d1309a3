"""One published task through the whole way: judge the source, lower it, judge the Program against
its region, store it.

        task ──> judged as a source ──> lowered ──> judged as a Program, timed ──> cache
                     └─ rejected          └─ not lowerable    └─ rejected, not faster

The source is only validated: what will run is the Program, so that is what is timed. Nothing but an
accepted Program is stored, and it never takes the place of a stored decision that is at least as
fast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, TypeAlias

from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.formats.task import PublishedTask
from torch_cudal1.ingest.published.lower_source import (
    CapturedReference,
    capture_reference,
    lower_candidate,
)
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Entry, Region
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.search.tune import Progress, tune_with
from torch_cudal1.store.cache.resolve import resolve
from torch_cudal1.store.context import TuneContext

__all__ = ["Adoption", "AdoptionOutcome", "Outcome"]

Outcome: TypeAlias = Literal[
    "accepted",
    "not_faster",
    "rejected",
    "not_lowerable",
    "withdrawn",
    "reference_unusable",
    "unreadable",
    # The budget ended before it was judged: the task is to be adopted again.
    "not_judged",
    # A fault of this package, not of the task: it is to be adopted again.
    "failed",
]
_ORIGIN = "published"


@dataclass(frozen=True)
class AdoptionOutcome:
    """What became of one task. `reason` and `detector` say why not; `stored`: whether the cache
    took the entry.

    `speedup`, `low`: of the Program over the best baseline, None if it was not timed. `tried`: each
    schedule that was judged.
    """

    outcome: Outcome
    reason: str = ""
    detector: str = ""
    region_key: str = ""
    stored: bool = False
    speedup: float | None = None
    low: float | None = None
    runs: str = ""
    tried: tuple[Mapping[str, Any], ...] = ()


class Adoption:
    """Adopts tasks one after the other; a reference that several share is captured once. Use it as
    a context manager.
    """

    def __init__(
        self, context: TuneContext, job: SourceEvaluationConfig, progress: Progress | None = None
    ) -> None:
        self._context, self._job = context, job
        self._say: Progress = progress or (lambda what, fraction: None)
        self._evaluator = SourceEvaluator(job, self._say)
        self._reference: tuple[str, CapturedReference | Refusal] | None = None

    def __enter__(self) -> Adoption:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._evaluator.close()

    def adopt(self, task: PublishedTask) -> AdoptionOutcome:
        """Take one task the whole way. Raises SandboxError if this machine cannot judge at all."""
        # Asked first: withdrawn and foreign tasks cost no process.
        if task.candidate is None:
            return AdoptionOutcome("withdrawn", "no code")
        if task.foreign:
            return AdoptionOutcome("not_lowerable", task.foreign)
        try:
            # Before lowering: a source that cheats must not be traced into a Program that looks
            # honest. Not timed, because what will run is the Program.
            judged = self._evaluator.evaluate(task.reference, task.candidate, timed=False)
            if (failure := judged.verdict.failure) is not None:
                # The check "inputs" is about the reference and its inputs: a failure there is not
                # the candidate's fault.
                outcome: Outcome = "reference_unusable" if failure.name == "inputs" else "rejected"
                return AdoptionOutcome(outcome, failure.detail, failure.name)
            self._say("lowering", None)
            reference = self._find_reference(task.reference)
            if isinstance(reference, Refusal):
                return AdoptionOutcome("not_lowerable", reference.reason)
            program = lower_candidate(task.candidate, "ModelNew", reference, self._job)
            if isinstance(program, Refusal):
                return AdoptionOutcome("not_lowerable", program.reason)
            # The reference's own graph: timing it against itself would tell nothing.
            if program == reference.region.program:
                return AdoptionOutcome(
                    "not_faster", "it is the reference's own graph", "timing", reference.region.key
                )
            return self._judge_and_store(task, reference, program)
        except ReferenceFailure as error:
            return AdoptionOutcome("reference_unusable", error.found, "inputs")

    def _find_reference(self, text: str) -> CapturedReference | Refusal:
        # Only the last one is kept: consecutive tasks that share a reference capture it once.
        if self._reference is None or self._reference[0] != text:
            self._reference = text, capture_reference(text, self._job)
        return self._reference[1]

    def _judge_and_store(
        self, task: PublishedTask, reference: CapturedReference, program: Program
    ) -> AdoptionOutcome:
        """Judge the Program against the region, under the key's lock; keep it if it is accepted and
        beats what is known.
        """
        region, context = reference.region, self._context
        # The lock of searches: otherwise a search that ends meanwhile would store a faster
        # decision, and this one would replace it.
        with context.cache.lock(region.key, context.target, context.contract):
            entry = tune_with(
                *(region, context, [(program, (_name_technique(task),))]),
                origin=_ORIGIN,
                examples=reference.inputs(),
                progress=self._say,
            )
            outcome = _make_outcome(entry, region, context.settings.budget_s)
            if outcome.outcome != "accepted":
                return outcome
            refusal = self._refuse_worse(region, entry)
            if refusal is not None:
                return replace(outcome, reason=refusal.reason)
            # The evidence names the source by digests: none of its text is stored.
            stored = context.cache.put(
                replace(entry, evidence={**entry.evidence, "published": _describe_provenance(task)})
            )
        if isinstance(stored, Refusal):
            telemetry.record("resolve", "not_stored", region.key, reason=stored.reason)
            return replace(outcome, reason=f"right and faster, but not stored: {stored.reason}")
        return replace(outcome, stored=True)

    def _refuse_worse(self, region: Region, entry: Entry) -> Refusal | None:
        """Why what the cache holds is to stay; None if the new entry is to take its place."""
        hit = resolve(
            region, (self._context.cache,), self._context.target, self._context.contract
        ).hit
        if (
            hit is None
            or hit.stale is not None
            or hit.entry.speedup < entry.speedup
            # An accepted Program beat every baseline in its own timing.
            or hit.entry.choice.origin == "baseline"
        ):
            return None
        stored_entry = hit.entry
        subject = (
            "the same Program is"
            if stored_entry.choice.digest == entry.choice.digest
            else f"{stored_entry.choice.label} is"
        )
        return Refusal(
            f"{subject} stored already, at {stored_entry.speedup:.2f}x; this one reached {entry.speedup:.2f}x"
        )


def _make_outcome(entry: Entry, region: Region, budget_s: float) -> AdoptionOutcome:
    """What the judge said of the Program: of several schedules the best, or else the one that came
    closest.
    """
    # Nothing was learnt about the candidate, so it is not counted as rejected.
    if entry.tried and all(attempt.get("decision") == "not judged" for attempt in entry.tried):
        reason = f"right as a source; benchmarking the baselines took the whole budget of {budget_s:g} s: give it more (--budget)"
        return AdoptionOutcome("not_judged", reason, "budget", region.key, tried=entry.tried)
    if entry.choice.origin != "baseline":
        timing = entry.evidence["timing"]
        return AdoptionOutcome(
            *("accepted", "", "", region.key),
            speedup=float(timing["speedup"]),
            low=float(timing["low"]),
            runs=entry.choice.label,
            tried=entry.tried,
        )
    timed = [attempt for attempt in entry.tried if attempt.get("speedup") is not None]
    best_attempt = (
        # By the lower end of the interval, as decisions are made.
        max(timed, key=lambda one: float(one["low"]))
        if timed
        else _choose_first_attempt(entry.tried)
    )
    outcome: Outcome = (
        "not_faster" if timed and best_attempt.get("detector") == "timing" else "rejected"
    )
    return AdoptionOutcome(
        outcome,
        str(best_attempt.get("reason", "")),
        str(best_attempt.get("detector", "")),
        region.key,
        speedup=best_attempt.get("speedup"),
        low=best_attempt.get("low"),
        tried=entry.tried,
    )


def _choose_first_attempt(attempts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return attempts[0] if attempts else {"reason": "nothing was judged", "detector": "timing"}


def _name_technique(task: PublishedTask) -> str:
    """How the choice is called in tables: the task's name, as one word."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in task.name)[
        :60
    ]


def _describe_provenance(task: PublishedTask) -> dict[str, Any]:
    """Where the Program came from: enough to find the source again, not the source."""
    texts = {"reference": task.reference, "candidate": task.candidate or ""}
    digests = {
        # A JSON release may hold lone surrogates, which strict UTF-8 refuses.
        name: hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        for name, text in texts.items()
    }
    return {"task": task.name, "where": task.where, "sha256": digests, "claims": dict(task.claims)}
