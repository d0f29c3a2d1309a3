"""Decides a deep model block by block: each block that occurs several times is searched for once, and
what was decided for it is put into every occurrence.

    whole ──> blocks ──> cache ──hit──> choice ──┐
                           └─miss──> tune ───────┴──> composed ──> checked once, end to end

A block is validated and benchmarked as any region, and its entry serves every model that has the
block. What lies between blocks, such as the ends of a stack that is cut within its layers, takes
the kernels that won in them. The composed whole is neither run nor benchmarked here: whoever binds it
compares its outputs with the own forward's and measures it end to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch_cudal1 import judge
from torch_cudal1.core import telemetry
from torch_cudal1.ir.aliasing import is_view
from torch_cudal1.ir.blocks import (
    BlockPartition,
    RepeatedBlock,
    Segment,
    compose_blocks,
    partition_blocks,
)
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import BY_BLOCKS, Candidate, Entry, Region
from torch_cudal1.ir.schedule import EAGER, REGIONAL, Schedule
from torch_cudal1.search.new_entry import make_entry
from torch_cudal1.search.operator_timing import OperatorChoice
from torch_cudal1.search.reuse import check_quarantine
from torch_cudal1.store.context import TuneContext

if TYPE_CHECKING:
    from torch_cudal1.search.tune import Choice

__all__ = ["COMPOSED_ORIGIN", "find_blocks_to_tune", "list_block_regions", "tune_by_blocks"]

# The origin of a whole whose blocks run what was decided for them.
COMPOSED_ORIGIN = "blocks"
# Steps of a region that are copies of others. A smaller region is searched for as a whole, where
# kernels may reach across the ends of blocks, unless it is a stack of layers: of six transformers
# of 12 layers a minute's search of the whole found kernels for three, beside four other searches
# (benchmarks/results/h200-real-tuned-fifth.json).
MIN_COPIED_STEPS = 400
_MIN_STACK_STEPS, _MIN_STACKED = 120, 5


@dataclass(frozen=True)
class _BlockDecision:
    """A block and what was decided for it."""

    block: RepeatedBlock
    choice: Choice

    @property
    def count(self) -> int:
        return len(self.block.occurrences)

    @property
    def evidence(self) -> Mapping[str, Any]:
        return self.choice.entry.evidence if self.choice.entry is not None else {}


def find_blocks_to_tune(region: Region) -> BlockPartition | None:
    """The blocks of a region that is to be decided by them; None where it is searched for as a
    whole.
    """
    if region.kind != "inference" or region.granularity != "whole":
        return None
    # Finding blocks takes a while, and this bounds the number of copies.
    if len(region.program.steps) < min(MIN_COPIED_STEPS, _MIN_STACK_STEPS):
        return None
    partition = partition_blocks(region.program)
    most = max((len(block.occurrences) for block in partition.blocks), default=0)
    # Without a CUDA graph blocks are called one by one, and on a CPU there are no kernels to find.
    is_stack = most >= _MIN_STACKED and region.program.device == "cuda"
    needed_steps = _MIN_STACK_STEPS if is_stack else MIN_COPIED_STEPS
    is_deep = partition.copied_steps >= needed_steps
    return partition if is_deep and not partition.lost_fusions else None


def tune_by_blocks(
    region: Region,
    place: TuneContext,
    partition: BlockPartition,
    choose_block: Callable[[Region, TuneContext], Choice],
    *,
    operators: OperatorChoice | None = None,
    fills_rest: bool = True,
) -> Entry:
    """Decide each block with `choose_block`, and compose the whole. The entry of the whole is not
    yet stored. The budget is that of all blocks together. `operators`: what `partition` is one of,
    where it is not the region's own Program. `fills_rest`: what lies between the blocks takes their
    kernels, for which templates and rewrites are imported.
    """
    started_s = judge.working_s()
    blocks = _sort_by_steps(partition.blocks)
    block_decisions: list[_BlockDecision] = []
    for number, block in enumerate(blocks):
        left_s = max(0.0, place.settings.budget_s - (judge.working_s() - started_s))
        # What a block leaves of its share is for those that follow.
        budget_s = left_s / (len(blocks) - number)
        settings = replace(place.settings, on_miss="tune", budget_s=budget_s)
        block_region = _make_block_region(region, block, number)
        choice = choose_block(block_region, replace(place, settings=settings))
        block_decisions.append(_BlockDecision(block, choice))
    telemetry.record(
        "search",
        "blocks",
        region.key,
        name=region.name,
        blocks=[item.choice.region.key for item in block_decisions],
        occurrences=[item.count for item in block_decisions],
    )
    operators = operators or OperatorChoice(region.program)
    candidate = _compose_candidate(
        region, operators, partition, block_decisions, place if fills_rest else None
    )
    # Found wrong in this place before, though every block is right alone.
    if check_quarantine(place, region, candidate) is not None:
        candidate = Candidate(region.program, candidate.schedule, "baseline")
    entry = make_entry(region, place, candidate)
    evidence = _compose_evidence(block_decisions, is_composed=candidate.origin == COMPOSED_ORIGIN)
    return replace(entry, evidence={**entry.evidence, **evidence})


def list_block_regions(region: Region, partition: BlockPartition) -> list[tuple[Region, int]]:
    """The different blocks of `region` as regions, each with the number of its occurrences, in the
    order in which they are decided.
    """
    return [
        (_make_block_region(region, block, number), len(block.occurrences))
        for number, block in enumerate(_sort_by_steps(partition.blocks))
    ]


def _sort_by_steps(blocks: Sequence[RepeatedBlock]) -> list[RepeatedBlock]:
    """Different blocks, those that are most of the steps first. One that occurs at two places of a
    model is one block.
    """
    block_of_digest: dict[str, RepeatedBlock] = {}
    for block in blocks:
        digest = block.program.digest
        earlier = block_of_digest.get(digest)
        occurrences = (*(earlier.occurrences if earlier else ()), *block.occurrences)
        block_of_digest[digest] = replace(block, occurrences=occurrences)
    return sorted(
        block_of_digest.values(),
        key=lambda block: -len(block.occurrences) * len(block.program.steps),
    )


def _make_block_region(region: Region, block: RepeatedBlock, number: int) -> Region:
    roles = tuple(
        region.roles[value] if value < len(region.roles) else "input"
        for value in block.occurrences[0].inputs
    )
    return Region(block.program, roles, region.kind, "block", f"{region.name}/block{number}")


def _compose_candidate(
    region: Region,
    operators: OperatorChoice,
    partition: BlockPartition,
    block_decisions: Sequence[_BlockDecision],
    place: TuneContext | None,
) -> Candidate:
    """`place`: where kernels for what lies between are looked for, None for none."""
    schedule = _compose_schedule(partition, block_decisions)
    replacements: dict[str, Program] = {
        item.block.program.digest: item.choice.candidate.program
        for item in block_decisions
        if item.choice.swapped
    }
    if not replacements:
        return operators.make_baseline(region, schedule)
    techniques = {
        *operators.techniques,
        *(
            name
            for item in block_decisions
            if item.choice.swapped
            for name in item.choice.candidate.techniques
        ),
    }
    if place is not None:
        from torch_cudal1.search.rest_of_blocks import splice_known_kernels

        block_programs = list(replacements.values())
        for segment in _list_rest(partition):
            program = splice_known_kernels(segment.program, block_programs, region, place)
            if program is not None:
                replacements[segment.digest] = program
    program = compose_blocks(partition, replacements)
    return Candidate(program, schedule, COMPOSED_ORIGIN, tuple(sorted(techniques)))


def _compose_schedule(
    partition: BlockPartition, block_decisions: Sequence[_BlockDecision]
) -> Schedule:
    """Of the whole: compiled where a block is, and where steps between blocks of kernels are left
    to PyTorch; in a CUDA graph where a block is.
    """
    schedules = [item.choice.candidate.schedule for item in block_decisions]
    compiles = any(schedule.compiles for schedule in schedules)
    # A block that is nothing but kernels runs without Inductor; what lies between has none.
    if any(item.choice.swapped for item in block_decisions) and _computes_between(partition):
        compiles = compiles or any(map(_has_inductor_timing, block_decisions))
    base = REGIONAL if compiles else EAGER
    return Schedule(base.base, any(schedule.cuda_graph for schedule in schedules))


def _list_rest(partition: BlockPartition) -> list[Segment]:
    """What lies between blocks, before and behind them."""
    digests = {block.program.digest for block in partition.blocks}
    return [segment for segment in partition.segments if segment.digest not in digests]


def _computes_between(partition: BlockPartition) -> bool:
    """Whether a step outside the blocks launches anything."""
    return any(
        not is_view(step) for segment in _list_rest(partition) for step in segment.program.steps
    )


def _has_inductor_timing(item: _BlockDecision) -> bool:
    """Whether Inductor ran as a baseline of the block, and so works on this machine."""
    return any(Schedule.parse(name).compiles for name in item.evidence.get("baselines_us") or {})


def _compose_evidence(
    block_decisions: Sequence[_BlockDecision], *, is_composed: bool
) -> dict[str, Any]:
    """What the blocks' entries say of the whole: times are sums over all occurrences, and say nothing
    of the steps between. A whole that is its baseline has no timing.
    """
    timings = [_read_times(item) for item in block_decisions]
    evidence: dict[str, Any] = {
        "tier": BY_BLOCKS,
        "blocks": [
            {
                "key": item.choice.region.key,
                "occurrences": item.count,
                "runs": item.choice.candidate.label,
                "speedup": item.choice.entry.speedup if item.choice.entry is not None else 1.0,
            }
            for item in block_decisions
        ],
    }
    if any(times is None for times in timings):
        return evidence
    all_times = [times for times in timings if times is not None]
    names = set.intersection(*(set(times["baselines_us"]) for times in all_times))
    evidence["baselines_us"] = {
        _rename_baseline(name): sum(
            item.count * times["baselines_us"][name]
            for item, times in zip(block_decisions, all_times, strict=True)
        )
        for name in sorted(names)
    }
    if is_composed:
        evidence["timing"] = _compose_timing(block_decisions, all_times, evidence["baselines_us"])
    return evidence


def _compose_timing(
    block_decisions: Sequence[_BlockDecision],
    times: Sequence[Mapping[str, Any]],
    baselines_us: Mapping[str, float],
) -> dict[str, Any]:
    def add_up(name: str) -> float:
        return math.fsum(
            item.count * float(each[name])
            for item, each in zip(block_decisions, times, strict=True)
        )

    baseline_us = add_up("baseline_us")
    return {
        "baseline": min(baselines_us, key=lambda name: baselines_us[name], default="eager"),
        "candidate_us": add_up("candidate_us"),
        "baseline_us": baseline_us,
        "speedup": baseline_us / add_up("candidate_us"),
        # As if every block were at its own bound at once.
        "low": baseline_us / add_up("slowest_us"),
        "high": baseline_us / add_up("fastest_us"),
        "profile": "blocks",
        "pairs": min(each["pairs"] for each in times),
        "baselines_us": dict(baselines_us),
        "details": {},
    }


def _read_times(item: _BlockDecision) -> dict[str, Any] | None:
    """Microseconds of one occurrence; None where the block was not benchmarked."""
    baselines_us: Mapping[str, float] = item.evidence.get("baselines_us") or {}
    if not baselines_us:
        return None
    timing: Mapping[str, Any] = item.evidence.get("timing") or {}
    if item.choice.swapped and timing:
        baseline_us = float(timing["baseline_us"])
        return {
            "baselines_us": baselines_us,
            "baseline_us": baseline_us,
            "candidate_us": float(timing["candidate_us"]),
            "slowest_us": baseline_us / float(timing["low"]),
            "fastest_us": baseline_us / float(timing["high"]),
            "pairs": int(timing.get("pairs", 0)),
        }
    # A baseline runs in this block, with candidate and without.
    fastest_us = min(baselines_us.values())
    names = ("baseline_us", "candidate_us", "slowest_us", "fastest_us")
    return {"baselines_us": baselines_us, **dict.fromkeys(names, fastest_us), "pairs": 0}


def _rename_baseline(name: str) -> str:
    """The whole's schedule under which a block runs as in its own benchmark."""
    schedule = Schedule.parse(name)
    base = REGIONAL if schedule.base == "inductor" else schedule
    return str(Schedule(base.base, schedule.cuda_graph))
