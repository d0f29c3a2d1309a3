"""Decides what runs for a region: resolves a cached entry, or tunes the region and stores one.

        region ──> cache ──hit──> choice
                     └─miss──> baselines ranked ──> candidates proposed and evaluated ──> best accepted, else best baseline ──> cache

`choose` is what the backend and the wrapper call; `tune` is the search. Neither puts anything into
a model (that is the work of `graph.swap`), and everything that runs a candidate happens in the
judge's own processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from torch_cudal1 import judge
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.cost import estimate_launch_us
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Entry, Region
from torch_cudal1.ir.schedule import EAGER, INDUCTOR
from torch_cudal1.search.new_entry import make_baseline, make_entry, store_checked_kernel
from torch_cudal1.search.reuse import (
    check_quarantine,
    check_reuse,
    list_cached_candidates,
    note_missing_inductor,
    record_refusals,
)
from torch_cudal1.store.cache.decision_record import call_name
from torch_cudal1.store.cache.resolve import Hit, resolve
from torch_cudal1.store.context import TuneContext

if TYPE_CHECKING:
    from torch_cudal1.search.operator_timing import OperatorChoice
    from torch_cudal1.search.space import SearchSpace

__all__ = [
    "Choice",
    "Progress",
    "choose",
    "compose_known_blocks",
    "fall_back_to_baseline",
    "make_end_to_end_name",
    "tune",
    "tune_with",
]

# Seconds of a budget that are for candidates, whatever the baselines took.
_LEAST_CANDIDATES_S = 30.0

# the step that is running, and the fraction of the work done if that is known
Progress: TypeAlias = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Choice:
    """What runs for a region, and why. `entry` is None when nothing is known: the baseline runs
    (`on_miss="baseline"`), or the caller's quick tier decides (`on_miss="quick"`).
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
    place: TuneContext,
    *,
    examples: Sequence[torch.Tensor] | None = None,
    progress: Progress | None = None,
) -> Choice:
    """The cached decision for `region`, or what `settings.on_miss` says. Raises CacheMissError only
    under on_miss="error".

    A decision in quarantine is not a miss: the baseline runs, unless `on_miss` is "tune".
    """
    resolved = resolve(region, place.sources, place.target, place.contract)
    hit = resolved.hit
    # Before any return: the report must show refused entries, whatever is chosen.
    record_refusals(region, resolved)
    quarantined = check_quarantine(place, region, hit.entry.choice) if hit is not None else None
    choice: Choice | Refusal = Refusal("no cached decision")
    if hit is not None and quarantined is None:
        choice = _choose_cached(region, hit, place)
    if isinstance(choice, Choice):
        return choice
    on_miss = place.settings.on_miss
    # Under "tune" a decision in quarantine is searched for again, as the docstring says.
    if on_miss == "tune":
        return _tune_and_store(region, place, examples, progress)
    # No CacheMissError, even under on_miss="error": production found the kernel wrong, and the call
    # must go on with the baseline.
    if quarantined is not None:
        reason = quarantined.reason
        telemetry.record("resolve", "quarantined", region.key, name=region.name, reason=reason)
        return Choice(region, make_baseline(region), None, reason)
    reason = choice.reason + (f" ({resolved.trouble})" if resolved.trouble else "")
    telemetry.record("resolve", "miss", region.key, name=region.name, reason=reason)
    if on_miss == "error":
        detail = "" if reason == "no cached decision" else f": {reason}"
        raise CacheMissError(region.key, (region.name or "unnamed region") + detail)
    return Choice(region, make_baseline(region), None, reason)


def compose_known_blocks(region: Region, place: TuneContext) -> Choice | Refusal:
    """The whole of a deep region, of what the cache knows of its blocks, without a search; a Refusal
    where it does not know all of them, or of all of them nothing but baselines.

    Whoever binds it compares its outputs and measures it. The entry is not yet stored.
    """
    from torch_cudal1.search.by_blocks import (
        COMPOSED_ORIGIN,
        find_blocks_to_tune,
        list_block_regions,
        tune_by_blocks,
    )

    operators = _choose_operators(region, place)
    partition = find_blocks_to_tune(replace(region, program=operators.program))
    if partition is None:
        return Refusal("it is not decided by its blocks")
    choices: dict[str, Choice] = {}
    for block, _ in list_block_regions(region, partition):
        choice = choices[block.key] = choose(block, place)
        # An entry of the whole would keep a search from those that are not known.
        if choice.entry is None:
            return Refusal(f"{block.name}: {choice.reason}")
    entry = tune_by_blocks(
        region,
        place,
        partition,
        lambda block, _: choices[block.key],
        operators=operators,
        fills_rest=False,
    )
    if entry.choice.origin != COMPOSED_ORIGIN:
        return Refusal("nothing beats PyTorch's own ways in its blocks")
    return Choice(region, entry.choice, entry, "composed of what was decided for its blocks")


def _choose_cached(region: Region, hit: Hit, place: TuneContext) -> Choice | Refusal:
    """The choice that a cache hit makes, or why the entry may not be used."""
    if (refusal := check_reuse(region, hit, place)) is not None:
        return Refusal(refusal.reason)
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


def _tune_and_store(
    region: Region,
    place: TuneContext,
    examples: Sequence[torch.Tensor] | None,
    progress: Progress | None,
) -> Choice:
    """Search under the key's lock, so that two processes never search the same key: the second one
    finds the entry of the first.
    """
    # A search takes minutes, and a second one of the same key would find the same.
    with place.cache.lock(region.key, place.target, place.contract):
        # Again under the lock: another process may have stored an entry meanwhile.
        hit = resolve(region, place.sources, place.target, place.contract).hit
        if hit is not None and check_quarantine(place, region, hit.entry.choice) is None:
            choice = _choose_cached(region, hit, place)
            if isinstance(choice, Choice):
                return choice
        entry = tune(
            region,
            place,
            examples=examples,
            known=list_cached_candidates(region, hit),
            progress=progress,
        )
        # Counts tries, so that a machine without Inductor does not search at every start.
        entry = note_missing_inductor(entry, hit.entry if hit is not None else None)
        stored = place.cache.put(entry)
    # A disk that refuses costs the next start a search, and this call nothing.
    if isinstance(stored, Refusal):
        telemetry.record("resolve", "not_stored", region.key, reason=stored.reason)
    return Choice(region, entry.choice, entry, "tuned now")


def fall_back_to_baseline(choice: Choice, reason: str) -> Choice:
    """A choice that must not run any more, replaced by the baseline; `reason`: why."""
    return Choice(choice.region, make_baseline(choice.region), None, reason)


def _choose_operators(region: Region, place: TuneContext) -> OperatorChoice:
    # A start on a warm cache needs none of this.
    from torch_cudal1.search.convolution_choice import choose_convolutions
    from torch_cudal1.search.operator_timing import OperatorChoice

    is_rewritten = region.kind == "inference" and "rewrites" not in place.settings.without
    # An island is cut out of a region that has such operators already.
    if not is_rewritten or region.granularity == "island":
        return OperatorChoice(region.program)
    return choose_convolutions(region.program, place.device)


def _keep_operators(entry: Entry, region: Region, operators: OperatorChoice) -> Entry:
    """`entry` with `operators`, where nothing beat the baselines: the quick tier has them, too."""
    if entry.choice.origin != "baseline" or not operators.techniques:
        return entry
    return replace(entry, choice=operators.make_baseline(region, entry.choice.schedule))


def _tune_by_blocks(
    region: Region,
    place: TuneContext,
    operators: OperatorChoice,
    known: Sequence[Candidate],
    progress: Progress | None,
) -> Entry | None:
    """What `tune` answers for a region that is decided by its blocks; None for any other."""
    # A start on a warm cache needs none of this.
    from torch_cudal1.search.by_blocks import COMPOSED_ORIGIN, find_blocks_to_tune, tune_by_blocks

    # A whole that was composed of blocks is composed anew: their entries say what is known.
    if any(candidate.origin != COMPOSED_ORIGIN for candidate in known):
        return None
    blocks = find_blocks_to_tune(replace(region, program=operators.program))
    if blocks is None:
        return None
    choose_block = functools.partial(choose, progress=progress)
    return tune_by_blocks(region, place, blocks, choose_block, operators=operators)


# Worker processes are kept for the whole search instead of one evaluation.
@judge.pool_scope()
def tune(
    region: Region,
    place: TuneContext,
    *,
    examples: Sequence[torch.Tensor] | None = None,
    known: Sequence[Candidate] = (),
    progress: Progress | None = None,
) -> Entry:
    """Rank the baselines, then judge candidates (`known` ones first) until they or the budget run
    out. The entry is not yet stored.

    A candidate that fails costs itself only; the reasons are in `tried`. A training graph without
    one (no rewrite pays, products do not dominate) is not benchmarked: its baseline is a part of
    the whole step, which is measured end to end. A deep inference region without known candidates
    is decided by its blocks.
    """
    telemetry.count("regions_tuned")
    operators = _choose_operators(region, place)
    composed = _tune_by_blocks(region, place, operators, known, progress)
    if composed is not None:
        return composed
    # They import every kernel template and rewrite: a model of known blocks needs none of them.
    from torch_cudal1.search.baselines import rank_schedules
    from torch_cudal1.search.lower_bound import lower_bound_us
    from torch_cudal1.search.space import build_search_space
    from torch_cudal1.search.strategy import StagedSearch
    from torch_cudal1.search.tuning_loop import TuningSession, run_tuning_loop

    started_s, report_progress = judge.working_s(), progress or _ignore_progress
    job = _make_job(place, examples)
    store_kernel = functools.partial(store_checked_kernel, place)
    space = build_search_space(region, place, job, store_kernel, operators)
    # Known candidates are judged in any case.
    if not known and _needs_no_benchmark(region, place, space):
        # In inference only a random region comes here, and no other schedule draws eager's numbers.
        schedule = EAGER if region.kind == "inference" else INDUCTOR
        return make_entry(region, place, Candidate(region.program, schedule, "baseline"))
    # In the background: the first process is ready when the ranking asks for it.
    judge.prestart_worker(region, job)
    report_progress(f"timing the baselines of {region.name or region.key[:12]}", 0.0)
    bound_us = lower_bound_us(space.cheapest_program, place.device)
    launch_us = estimate_launch_us(space.cheapest_program)
    ranking = rank_schedules(region, place, job, launch_us, bound_us)
    if space.will_be_remeasured:
        # started while the candidate is validated: the baselines are timed without company
        judge.prestart_worker(region, job)
    ranked_s = judge.working_s()
    deadline = ranked_s + _limit_candidates_s(place.settings.budget_s, ranked_s - started_s)
    strategy = StagedSearch(space, ranking, deadline, known)
    entry = run_tuning_loop(
        TuningSession(region, place, strategy, ranking, job, deadline, report_progress, bound_us)
    )
    telemetry.record(
        "search",
        "seconds",
        region.key,
        baselines=ranked_s - started_s,
        candidates=judge.working_s() - ranked_s,
    )
    return _keep_operators(entry, region, operators)


def _limit_candidates_s(budget_s: float, baselines_s: float) -> float:
    """Seconds for candidates of a budget, of which timing the baselines took some."""
    # A user waits for both. The baselines are needed in any case, and a short budget is for
    # candidates.
    return max(min(budget_s, _LEAST_CANDIDATES_S), budget_s - baselines_s)


@judge.pool_scope()
def tune_with(
    region: Region,
    place: TuneContext,
    programs: Sequence[tuple[Program, tuple[str, ...]]],
    *,
    origin: str,
    examples: Sequence[torch.Tensor] | None = None,
    progress: Progress | None = None,
) -> Entry:
    """Rank the baselines, then judge `programs` (each with its techniques) under the best
    schedules, and propose nothing else.

    The entry is not yet stored; its choice is a baseline where none was accepted.
    """
    from torch_cudal1.search.baselines import list_baseline_schedules
    from torch_cudal1.search.schedules import make_candidates, order_schedules
    from torch_cudal1.search.strategy import FixedOrder
    from torch_cudal1.search.tuning_loop import TuningSession, run_tuning_loop

    telemetry.count("regions_tuned")
    report_progress = progress or _ignore_progress
    job = _make_job(place, examples)
    report_progress(f"timing the baselines of {region.name or region.key[:12]}", 0.0)
    ranking = judge.rank_baselines(region, list_baseline_schedules(region, place), job)
    deadline = judge.working_s() + place.settings.budget_s
    schedules = order_schedules(ranking, region)
    strategy = FixedOrder(make_candidates(programs, schedules, origin=origin))
    return run_tuning_loop(
        TuningSession(region, place, strategy, ranking, job, deadline, report_progress)
    )


def _make_job(
    place: TuneContext, examples: Sequence[torch.Tensor] | None
) -> judge.EvaluationConfig:
    inputs = tuple(examples) if examples is not None else None
    return judge.EvaluationConfig(place.settings, place.contract, place.device, inputs)


def _needs_no_benchmark(region: Region, place: TuneContext, space: SearchSpace) -> bool:
    """Whether nothing can compete with the baseline: in a training graph without candidates, or
    where random numbers are drawn off a GPU, since only eager is known to draw eager's numbers.
    """
    draws_on_host = place.device.type != "cuda" and is_random_program(region.program)
    return space.is_empty and (region.kind != "inference" or draws_on_host)


def make_end_to_end_name(choices: Sequence[Choice]) -> str:
    """The name under which the cache stores how the whole call of a model with these regions was
    measured.
    """
    return call_name(choice.region.key for choice in choices)


def _ignore_progress(step: str, fraction: float | None) -> None:
    """Progress where the caller asked for none."""
