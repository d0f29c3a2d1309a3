"""The whole flow on one page: resolve a region, or tune it: propose, judge, decide, remember.

        region ──> cache ──hit──> choice
                     └─miss──> baselines raced ──> variants built and judged ──> best accepted, else best baseline ──> cache

`choose` is what the backend and the wrapper call; `tune` is the search. Neither puts anything into
a model (that is swap's work), and everything that runs a candidate happens in the judge's own
processes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torch_cudal1 import judge
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, SandboxError
from torch_cudal1.core.report import per_call
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import attestation
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.cost import launches_us
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import (
    Accepted,
    Candidate,
    Entry,
    Miss,
    Region,
    Rejected,
    Schedule,
    Verdict,
)
from torch_cudal1.search.compose import compose
from torch_cudal1.search.reuse import (
    STRANGER,
    is_baseline,
    known_candidates,
    noted,
    refusal,
    tell_refusals,
)
from torch_cudal1.store.cache import quarantine
from torch_cudal1.store.cache.decision_record import call_name
from torch_cudal1.store.cache.local_cache import NotStored
from torch_cudal1.store.cache.resolve import Hit, resolve
from torch_cudal1.store.context import Place

if TYPE_CHECKING:
    from torch_cudal1.search.strategy import Standing

__all__ = [
    "Choice",
    "Progress",
    "choose",
    "end_to_end_name",
    "held_back",
    "tune",
    "tune_with",
    "withdrawn",
]

Progress: TypeAlias = Callable[
    [str, float | None], None
]  # what is being done, and the fraction done if known

_AUTOTUNE_BUDGET_S = 600.0  # max-autotune compiles for minutes; whoever gives ten has them
_REFERENCE_SCHEDULE: Schedule = "eager"
_LIKELY = 0.5  # of a judgement's time must be left for another one to begin
_LATE_S = (
    30.0  # after the end of a budget: what is sure to be compiling still, then, does not begin
)
# of the least time that a region can take: so little of it cannot be gained by a CUDA graph's
# launch
_LITTLE = 0.02
_NEAR = (
    1.1  # of the least time that a region can take: what is left to gain is not worth a judgement
)


@dataclass(frozen=True)
class Choice:
    """What runs for a region, and why. `entry` is None when nothing is known and the baseline runs
    (`on_miss="baseline"`).
    """

    region: Region
    candidate: Candidate
    entry: Entry | None
    reason: str

    @property
    def swapped(self) -> bool:
        """True when something other than a baseline runs."""
        return self.candidate.origin != "baseline"


def choose(
    region: Region,
    place: Place,
    *,
    examples: Sequence[torch.Tensor] | None = None,
    progress: Progress | None = None,
) -> Choice:
    """The cached decision for `region`, or what `settings.on_miss` says. Raises CacheMissError only
    under on_miss="error".

    A decision in quarantine is not a miss: the baseline runs, unless `on_miss` is "tune".
    """
    resolved = resolve(region, place.sources, place.target, place.contract)
    found = resolved.hit
    tell_refusals(region, resolved)
    held = held_back(place, region, found.entry.choice) if found is not None else ""
    usable = (
        _usable(region, found, place)
        if found is not None and not held
        else Miss("no cached decision")
    )
    if isinstance(usable, Choice):
        return usable
    on_miss = place.settings.on_miss
    if on_miss == "tune":
        return _tuned(region, place, examples, progress)
    baseline = Candidate(region.program, _REFERENCE_SCHEDULE, "baseline")
    if held:
        telemetry.record("resolve", "quarantined", region.key, name=region.name, reason=held)
        return Choice(region, baseline, None, held)
    reason = usable.reason + (f" ({resolved.trouble})" if resolved.trouble else "")
    telemetry.record("resolve", "miss", region.key, name=region.name, reason=reason)
    if on_miss == "error":
        told = "" if reason == "no cached decision" else f": {reason}"
        raise CacheMissError(region.key, (region.name or "unnamed region") + told)
    return Choice(region, baseline, None, reason)


def withdrawn(choice: Choice, reason: str) -> Choice:
    """What is left of a choice that must not run any more: the baseline, and why."""
    return Choice(
        choice.region,
        Candidate(choice.region.program, _REFERENCE_SCHEDULE, "baseline"),
        None,
        reason,
    )


def held_back(place: Place, region: Region, candidate: Candidate) -> str:
    """Why production has put this candidate in quarantine, "" if it has not. A baseline never is."""
    if is_baseline(region, candidate):
        return ""
    return quarantine.reason_for(
        (place.cache.root, *place.cache.read_only), region.key, candidate.digest
    )


@judge.kept_warm()
def tune(
    region: Region,
    place: Place,
    *,
    examples: Sequence[torch.Tensor] | None = None,
    known: Sequence[Candidate] = (),
    progress: Progress | None = None,
) -> Entry:
    """Race the baselines, then judge candidates (`known` ones first) until they or the budget run
    out. The entry is not yet stored.

    A candidate that fails costs itself only; the reasons are in `tried`. A training graph without
    one (no rewrite pays, products do not dominate) is not raced: its baseline is a part of the
    whole step, which is measured end to end.
    """
    from torch_cudal1.search.lower_bound import floor_us

    # with every kernel and rewrite: a start on a warm cache needs none of them
    from torch_cudal1.search.strategy import (
        Standing,
        search,
    )

    telemetry.count("regions_tuned")
    say, begun = progress or _quiet, judge.working_s()
    job = judge.Job(
        place.settings,
        place.contract,
        place.device,
        tuple(examples) if examples is not None else None,
    )
    space = search(region, place, job, functools.partial(_remember, place))
    if (
        space.is_empty
        and (region.kind != "inference" or _draws_on_host(region, place))
        and not known
    ):
        schedule: Schedule = "eager" if region.kind == "inference" else "inductor"
        return _entry(
            region, place, _Best(Candidate(region.program, schedule, "baseline"), None), None, []
        )
    judge.begin(region, job)
    say(f"racing baselines of {region.name or region.key[:12]}", 0.0)
    floor = floor_us(space.least, place.device)
    ranking = _ranked(region, place, job, launches_us(space.least), floor)
    if space.surprises:
        judge.begin(
            region, job
        )  # while the candidate is validated; the baselines are timed without company
    deadline = judge.working_s() + place.settings.budget_s
    raced, standing = judge.working_s(), Standing()
    candidates = itertools.chain(known, space.candidates(ranking, deadline, standing))
    entry = _decided(region, place, candidates, _Race(ranking, job, deadline, say, standing, floor))
    telemetry.record(
        "search",
        "seconds",
        region.key,
        baselines=raced - begun,
        candidates=judge.working_s() - raced,
    )
    return entry


def _ranked(
    region: Region, place: Place, job: judge.Job, least_us: float, floor: float
) -> judge.Ranking:
    """The race of the baselines, without CUDA graphs where launching is next to nothing of what
    even the least form of the region must take: they would save none of it, and hold its inputs and
    results a second time.
    """
    schedules, most_us = _schedules(place), max(least_us, launches_us(region.program))
    if most_us > _LITTLE * floor:
        return judge.rank_baselines(region, schedules, job)
    why = f"not raced: of at least {per_call(floor)} at most {per_call(most_us)} are launches"
    ranking = judge.rank_baselines(region, [name for name in schedules if "+" not in name], job)
    return replace(
        ranking, failures={**ranking.failures, **{name: why for name in schedules if "+" in name}}
    )


@judge.kept_warm()
def tune_with(
    region: Region,
    place: Place,
    programs: Sequence[tuple[Program, tuple[str, ...]]],
    *,
    origin: str,
    examples: Sequence[torch.Tensor] | None = None,
    progress: Progress | None = None,
) -> Entry:
    """Race the baselines, then judge `programs` (each with its techniques) under the best
    schedules, and propose nothing else.

    The entry is not yet stored; its choice is a baseline where none was accepted.
    """
    from torch_cudal1.search.strategy import Standing, fastest_first

    telemetry.count("regions_tuned")
    say = progress or _quiet
    job = judge.Job(
        place.settings,
        place.contract,
        place.device,
        tuple(examples) if examples is not None else None,
    )
    say(f"racing baselines of {region.name or region.key[:12]}", 0.0)
    ranking = judge.rank_baselines(region, _schedules(place), job)
    deadline = judge.working_s() + place.settings.budget_s
    candidates = compose(programs, fastest_first(ranking, region), origin=origin)
    return _decided(region, place, candidates, _Race(ranking, job, deadline, say, Standing()))


@dataclass(frozen=True)
class _Race:
    """What candidates are judged against, until when, and how it stands. `floor_us`: the least that
    the region can take, or 0.0.
    """

    ranking: judge.Ranking
    job: judge.Job
    deadline: float
    say: Progress
    standing: Standing
    floor_us: float = 0.0

    def over(self, margin: float) -> str:
        """Why nothing more can be gained, "" if something can: the best is near what the device can
        do at all.
        """
        best_us = self.standing.best_us
        near = _NEAR if best_us is not None else margin
        if best_us is None:
            best_us = min(self.ranking.medians_us.values(), default=math.inf)
        return (
            ""
            if best_us > near * self.floor_us
            else f"{per_call(best_us)}; the device needs at least {per_call(self.floor_us)}"
        )


def _decided(
    region: Region, place: Place, candidates: Iterable[Candidate | Rejected], race: _Race
) -> Entry:
    """Judge candidates until they or the budget run out, or nothing more can be gained; the entry
    of the best.
    """
    best, tried, longest_s = _Best(race.ranking.best, None), [], 0.0
    upcoming = iter(candidates)
    while True:
        if told := race.over(
            place.settings.margin
        ):  # before the next one is made: that takes longest
            tried.append(
                {"label": "whatever else there is", "decision": "not judged", "reason": told}
            )
            break
        if (candidate := next(upcoming, None)) is None:
            break
        if isinstance(candidate, Rejected):
            tried.append(
                {"label": candidate.detector, "decision": "rejected", "reason": candidate.reason}
            )
            continue
        if held := held_back(place, region, candidate):
            tried.append(
                {
                    "label": candidate.label,
                    "decision": "rejected",
                    "detector": "quarantine",
                    "reason": held,
                }
            )
            continue
        if revoked := place.cache.revoked(candidate.program):
            tried.append(
                {
                    "label": candidate.label,
                    "decision": "rejected",
                    "detector": "revoked",
                    "reason": revoked,
                }
            )
            continue
        if settled := best.settles(candidate):
            tried.append({"label": candidate.label, "decision": "not judged", "reason": settled})
            continue
        begun = judge.working_s()
        if spent := _spent(
            race.deadline - begun, longest_s, race.ranking.compiling_s(candidate.schedule)
        ):
            tried.append({"label": candidate.label, "decision": "not judged", "reason": spent})
            continue
        left = (race.deadline - begun) / max(place.settings.budget_s, 1e-9)
        race.say(f"judging {candidate.label}", min(1.0, 1 - left))
        judgement = _judged(region, candidate, race)
        longest_s = max(longest_s, judge.working_s() - begun)
        tried.append(judge.tried(judgement))
        best = best.or_better(judgement)
        if best.judgement and best.judgement.timing:
            race.standing.best_us, race.standing.best = (
                best.judgement.timing.candidate_us,
                best.candidate,
            )
        if judgement.timing is not None:
            race.standing.gain = max(race.standing.gain, judgement.timing.speedup)
    race.say("decided", 1.0)
    return _entry(region, place, best, race.ranking, tried)


def _spent(left_s: float, longest_s: float, compiling_s: float) -> str:
    """Why no judgement begins any more, "" if one does: what has begun is finished, so it should
    end near the budget's end.

    `longest_s`: of the judgements of this region; on a busy machine the first one tells what the
    next will take. `compiling_s`: what its baseline under the same schedule took to be compiled; of
    a network of 200 layers that alone is over a minute.
    """
    if left_s <= 0:
        return "the budget was spent"
    if left_s < _LIKELY * longest_s:
        return (
            f"{left_s:.1f} s of the budget were left, and a judgement has taken {longest_s:.1f} s"
        )
    if compiling_s - left_s > _LATE_S:
        return f"{left_s:.1f} s of the budget were left, and compiling the baseline has taken {compiling_s:.1f} s"
    return ""


def _judged(region: Region, candidate: Candidate, race: _Race) -> judge.Judgement:
    """The judgement of a candidate; a stranger's runs confined as a stranger's, and where that
    cannot be had it is refused.
    """
    if candidate.origin != STRANGER:
        return judge.judge(region, candidate, race.ranking, race.job)
    try:
        return judge.judge(region, candidate, race.ranking, replace(race.job, trust="foreign"))
    except SandboxError as error:  # our own candidates are judged all the same
        return judge.Judgement(candidate, Rejected(str(error), "sandbox"), Verdict(()))


def _entry(
    region: Region,
    place: Place,
    best: _Best,
    ranking: judge.Ranking | None,
    tried: Sequence[Mapping[str, Any]],
) -> Entry:
    return Entry(
        region_key=region.key,
        region_name=region.name,
        target=place.target,
        contract=place.contract,
        choice=best.candidate,
        evidence=_evidence(region, best, ranking),
        tried=tuple(tried),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        package=__version__,
    )


@dataclass(frozen=True)
class _Best:
    """The best choice so far: a baseline until a candidate is accepted, then the one with the
    highest lower bound.
    """

    candidate: Candidate
    judgement: judge.Judgement | None

    def settles(self, candidate: Candidate) -> str:
        """Why `candidate` cannot win by 5 %: the same Program with or without a CUDA graph, whose
        launches are less of its time.
        """
        timing, own = self.judgement.timing if self.judgement else None, self.candidate
        if timing is None or own.program.digest != candidate.program.digest:
            return ""
        most_us = launches_us(own.program)
        if (
            own.schedule.partition("+")[0] != candidate.schedule.partition("+")[0]
            or most_us > 0.05 * timing.candidate_us
        ):
            return ""
        return f"{own.label} takes {per_call(timing.candidate_us)}, at most {per_call(most_us)} of it to launch it"

    def or_better(self, judgement: judge.Judgement) -> _Best:
        if not isinstance(judgement.decision, Accepted):
            return self
        own = self.judgement.timing if self.judgement else None
        if own is not None and judgement.decision.timing.low <= own.low:
            return self
        return _Best(judgement.candidate, judgement)


def _evidence(region: Region, best: _Best, ranking: judge.Ranking | None) -> dict[str, Any]:
    proof = (
        judge.evidence(best.judgement, ranking)
        if best.judgement and ranking
        else {"timing": None, "checks": []}
    )
    return {
        **proof,
        "kind": region.kind,
        "granularity": region.granularity,
        "baselines_us": dict(ranking.medians_us) if ranking else {},
        "baseline_failures": dict(ranking.failures) if ranking else {},
        "attestation": attestation(),
    }


def _usable(region: Region, hit: Hit, place: Place) -> Choice | Miss:
    """A hit as a choice, or why it may not be used as it is."""
    if reason := refusal(region, hit, place):
        return Miss(reason)
    telemetry.count("entries_reused")
    telemetry.record(
        "resolve",
        "hit",
        region.key,
        where=hit.where,
        vouched_by=hit.vouched_by,
        runs=hit.entry.choice.label,
    )
    reason = f"cached decision of {hit.entry.created}, vouched for by {hit.vouched_by}"
    reason += f"; tuned without Inductor: {why}" if (why := hit.entry.without_inductor) else ""
    return Choice(region, hit.entry.choice, hit.entry, reason)


def _tuned(
    region: Region, place: Place, examples: Sequence[torch.Tensor] | None, progress: Progress | None
) -> Choice:
    """Search under the key's lock, so that two processes never search the same key: the second one
    finds the first one's entry.
    """
    with place.cache.lock(region.key, place.target, place.contract):
        again = resolve(region, place.sources, place.target, place.contract).hit
        held = held_back(place, region, again.entry.choice) if again is not None else ""
        usable = _usable(region, again, place) if again is not None and not held else None
        if isinstance(usable, Choice):
            return usable
        entry = tune(
            region,
            place,
            examples=examples,
            known=known_candidates(region, again),
            progress=progress,
        )
        entry = noted(entry, again.entry if again is not None else None)
        stored = place.cache.put(entry)
    if isinstance(stored, NotStored):
        telemetry.record("resolve", "not_stored", region.key, reason=stored.reason)
    return Choice(region, entry.choice, entry, "tuned now")


def _draws_on_host(region: Region, place: Place) -> bool:
    """Whether it draws random numbers off a GPU, where eager is the only baseline that is known to
    draw eager's.
    """
    return place.device.type != "cuda" and is_random_program(region.program)


def _schedules(place: Place) -> list[Schedule]:
    """The baselines of the race."""
    without = place.settings.without
    bases: list[Schedule] = ["eager"] if "compile" in without else ["eager", "inductor"]
    if "compile" not in without and (
        place.settings.autotune or place.settings.budget_s >= _AUTOTUNE_BUDGET_S
    ):
        bases.append("max-autotune")
    graphs: dict[Schedule, Schedule] = {
        "eager": "eager+graph",
        "inductor": "inductor+graph",
        "max-autotune": "max-autotune+graph",
    }
    return (
        bases + [graphs[base] for base in bases]
        if place.device.type == "cuda" and "graphs" not in without
        else bases
    )


def _remember(
    place: Place, region: Region, kernel: Candidate | None, reasons: Sequence[Rejected]
) -> None:
    """Store a kernel that was checked and never timed, or that there is none."""
    tried = [{"label": r.detector, "decision": "rejected", "reason": r.reason} for r in reasons]
    best = _Best(kernel or Candidate(region.program, _REFERENCE_SCHEDULE, "baseline"), None)
    place.cache.put(_entry(region, place, best, None, tried))


def end_to_end_name(choices: Sequence[Choice]) -> str:
    """The name under which the cache remembers how the whole call of a model with these regions was
    measured.
    """
    return call_name(choice.region.key for choice in choices)


def _quiet(what: str, fraction: float | None) -> None:
    """Progress that nobody watches."""
