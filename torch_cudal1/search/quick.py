"""The quick tier's part in a search: which schedules of PyTorch's own operators it tries, and the
entry that it leaves in the cache.

What the quick tier runs is right by construction: the user's own Program, step by step or through
Inductor, whole or block by block, with or without a CUDA graph. So no candidate is made and nothing
is validated; `api.quick_tier` benchmarks the schedules in the user's own process, as part of the
first compile. A search (`on_miss="tune"`) goes on from there: to it such an entry is a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch_cudal1.ir.blocks import partition_blocks
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.records import QUICK, Candidate, Entry, Region
from torch_cudal1.ir.schedule import EAGER, INDUCTOR, REGIONAL, Schedule
from torch_cudal1.search.new_entry import make_entry
from torch_cudal1.store.context import TuneContext

__all__ = [
    "explain_no_schedule",
    "is_compiled_by_blocks",
    "list_quick_schedules",
    "make_quick_entry",
]

# Of the steps, where each block is counted once: with more of them Inductor is not through much
# earlier.
_MAX_DISTINCT_SHARE = 0.5
# With fewer steps that are copies Inductor is through in seconds anyway.
MIN_COPIED_STEPS = 100


def list_quick_schedules(
    regions: Sequence[Region], place: TuneContext, *, writes: bool = False
) -> list[Schedule]:
    """The schedules that the quick tier benchmarks beside the module's own forward, in the order in
    which they are built. Eager step by step is never one: it is the own forward with more overhead.
    `writes`: whether the call writes to its inputs; such a call is compiled as Dynamo traced it,
    which is no Program.
    """
    without, on_gpu = place.settings.without, place.device.type == "cuda"
    draws = any(is_random_program(region.program) for region in regions)
    # Off a GPU only eager is known to draw eager's random numbers.
    may_compile = "compile" not in without and (on_gpu or not draws)
    # A training step's graphs are called by autograd, which holds what they return.
    if not on_gpu or "graphs" in without or len(regions) > 1:
        return [INDUCTOR] if may_compile else []
    # Compiled ones first: where the GPU's memory does not last for every contender, the one that
    # fails is the least promising.
    by_blocks = not writes and is_compiled_by_blocks(regions[0])
    compiled = [REGIONAL if by_blocks else INDUCTOR] if may_compile else []
    return compiled + [Schedule(schedule.base, True) for schedule in (*compiled, EAGER)]


def explain_no_schedule(regions: Sequence[Region], place: TuneContext) -> str:
    """Why the quick tier has nothing to benchmark beside the module's own forward."""
    if "compile" in place.settings.without:
        return "the setting `without` leaves compilation out"
    if any(is_random_program(region.program) for region in regions):
        return "it draws random numbers, and off a GPU only eager is known to draw eager's"
    return "PyTorch has no other way to run it here"


def is_compiled_by_blocks(region: Region) -> bool:
    """Whether Inductor has less to compile of an inference region block by block, at no cost in
    fusions.
    """
    # Finding blocks takes a while, and the steps bound the number of copies.
    if region.kind != "inference" or len(region.program.steps) < MIN_COPIED_STEPS:
        return False
    partition = partition_blocks(region.program)
    return (
        partition.copied_steps >= MIN_COPIED_STEPS
        and partition.distinct_share <= _MAX_DISTINCT_SHARE
        and not partition.lost_fusions
    )


def make_quick_entry(
    region: Region,
    place: TuneContext,
    candidate: Candidate,
    medians_us: Mapping[str, float],
    failures: Mapping[str, str],
) -> Entry:
    """The entry of a region that runs `candidate`, its own Program or that with other attention
    operators of PyTorch's. `medians_us`: of the whole call under each schedule; `failures`: why
    others have none.
    """
    entry = make_entry(region, place, candidate)
    evidence = {
        **entry.evidence,
        "tier": QUICK,
        "baselines_us": dict(medians_us),
        "baseline_failures": dict(failures),
    }
    return replace(entry, evidence=evidence)
