"""Checks of what a candidate does to the machine: memory, threads and descriptors that grow, late
results, canaries touched.

Counts come from the child and are compared here. They show growth over many calls and what is left
after them; memory taken and given back within a call is bounded by the limits of the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.tensor_bits import same_bits

__all__ = ["ISOLATION", "RESOURCE", "check_isolation", "check_resources"]

_LATE_S = 0.05  # a thread that fills outputs later has had its turn by then
_WARM_CALLS = 5
_CALL_BYTES = 16 << 10  # what an allocator may keep of a call without it being a leak
_SLACK_BYTES = 2 << 20
_GPU_BYTES = 64 << 10
_GPU_SLACK_BYTES = 32 << 20  # the driver's view moves in its own steps
_MIN_LOOKS, _MAX_LOOKS = 5, 13
_ON_GPU = ("gpu_bytes", "gpu_used_bytes")
_COUNTS = ("threads", "descriptors", "files")
# the last stands for Inductor's pool
_WAITING = ("/threading.py", "/queue.py", "/_inductor/async_compile.py")
# their pools outlive a call; torch starts them
_COMPILERS = ("torch/_inductor/", "torch/_dynamo/", "triton/")
# a library's own helper, as the monitor of a progress bar
_INSTALLED = ("/site-packages/", "/dist-packages/")
_HELPERS = ("torch/_inductor/compile_worker", "multiprocessing.resource_tracker")


def check_resources(trial: Trial) -> list[CheckResult]:
    """Results do not come late; nothing grows over every stretch of calls; no thread or process of
    its own is left.
    """
    sample, _ = trial.first_two
    # A result that is filled later would be right by the time that it is compared.
    late = _find_late_write(trial, sample)
    if late:
        return [CheckResult("resource", False, detail=late)]
    calls, limits = trial.profile.resource_calls, _set_growth_limits(trial)
    # The first stretch warms up: caches and pools fill once.
    looks = [
        _measure_usage(trial, sample, _WARM_CALLS),
        _measure_usage(trial, sample, calls),
        _measure_usage(trial, sample, calls),
    ]
    # Growth that ends is no leak, so a stretch that looks like one is followed by others.
    while _find_growth(looks, calls, limits) and len(looks) < _limit_looks(looks, calls, limits):
        looks.append(_measure_usage(trial, sample, calls))
    problem = _find_growth(looks, calls, limits) or _find_leftovers(
        looks[-1], source=isinstance(trial.candidate, SourceCandidate)
    )
    growth = _measure_smallest_growth(looks, "data_bytes")
    detail = problem or f"{(len(looks) - 1) * calls} calls, the growth of {calls} in bytes"
    return [
        CheckResult(
            "resource",
            not problem,
            float(max(0, growth)),
            float(_limit_growth_bytes(calls)),
            detail,
        )
    ]


def _limit_looks(looks: list[Mapping[str, Any]], calls: int, limits: Mapping[str, int]) -> int:
    """A leak goes on; a late start does not, nor does another process that takes memory of the same
    GPU, but that takes a while.
    """
    return _MAX_LOOKS if _find_growth(looks, calls, limits).startswith("gpu used") else _MIN_LOOKS


def _find_late_write(trial: Trial, sample: InputSet) -> str:
    before = trial.run(sample, hold=True).outputs
    # The child is left alone: threads of its own get the processor.
    trial.child.sharing.pause_for(_LATE_S)
    after = trial.reread(0)
    trial.child.call("drop", names=[])
    changed = [
        i
        for i, (then, now) in enumerate(zip(before, after, strict=True))
        if not same_bits(then, now)
    ]
    return (
        f"output {changed[0]} changed {_LATE_S * 1e3:.0f} ms after the call had returned"
        if changed
        else ""
    )


def _measure_usage(trial: Trial, sample: InputSet, calls: int) -> Mapping[str, Any]:
    """What the process holds after so many calls."""
    usage = trial.ask("many", inputs=sample.name, calls=calls).get("usage")
    numbers = (
        "resident_bytes",
        "data_bytes",
        *_COUNTS,
        *(_ON_GPU if trial.device.type == "cuda" else ()),
    )
    # The counts come from the process on trial; `bool` is an `int` too.
    if not isinstance(usage, dict) or any(type(usage.get(name)) is not int for name in numbers):
        raise CandidateFailure(
            "many", "an answer without the counts that were asked for", "protocol"
        )
    return usage


def _measure_smallest_growth(looks: list[Mapping[str, Any]], name: str) -> int:
    """Of the stretch that grew less: what happens once is not a leak."""
    # A leak grows in every stretch; what happens once, such as a cache that fills, in one of them.
    return min(int(after[name]) - int(before[name]) for before, after in pairwise(looks))


def _limit_growth_bytes(calls: int) -> int:
    return _SLACK_BYTES + _CALL_BYTES * calls


def _set_growth_limits(trial: Trial) -> dict[str, int]:
    """By how much each number may grow over a stretch of calls."""
    # An allocator may keep some memory of each call without a leak.
    allowed = _limit_growth_bytes(trial.profile.resource_calls)
    # Threads, descriptors and files must not grow at all.
    limits = {**dict.fromkeys(_COUNTS, 0), "resident_bytes": allowed, "data_bytes": allowed}
    if trial.device.type == "cuda":
        limits |= {"gpu_bytes": _GPU_BYTES} | (
            # The driver's count is of the whole GPU: allocations of other processes of this package
            # would look like growth of this one.
            {"gpu_used_bytes": _GPU_SLACK_BYTES} if trial.is_alone_on_device else {}
        )
    return limits


def _find_growth(looks: list[Mapping[str, Any]], calls: int, limits: Mapping[str, int]) -> str:
    for name, limit in limits.items():
        growth = _measure_smallest_growth(looks, name)
        if growth > limit:
            return f"{name.replace('_', ' ')} grow by {growth} over {calls} calls, at most {limit}"
    return ""


def _find_leftovers(usage: Mapping[str, Any], *, source: bool) -> str:
    """Processes that are no helpers of an installed library, and threads of Python; ""
    if there are none.
    """
    # A Program runs no Python and starts no threads: those in its process are the pool of
    # Inductor's compiler.
    threads = [str(stack) for stack in usage.get("python_threads", ())] if source else []
    compiling = any(part in stack for stack in threads for part in _COMPILERS)
    foreign = [
        stack
        for stack in threads
        # Compilers' pools outlive a call; an idle worker of one is no leftover of the source.
        if not any(part in stack for part in _INSTALLED) and not (compiling and _is_idle(stack))
    ]
    if foreign:
        return f"a thread of its own runs on after the call: {foreign[0].split()[-1]}"
    processes = [
        str(command)
        for command in usage.get("children", ())
        if not any(part in str(command) for part in _HELPERS)
    ]
    return (
        f"a process of its own runs on after the call: {processes[0][:80]!r}" if processes else ""
    )


def _is_idle(stack: str) -> bool:
    """A worker of a pool that waits for work: nothing but the standard library on its stack."""
    return all("/concurrent/futures/" in file or file.endswith(_WAITING) for file in stack.split())


def check_isolation(trial: Trial) -> list[CheckResult]:
    """A file outside the child's folder and a port of this process are as they were."""
    disturbance = trial.child.canaries.find_disturbed()
    return [
        CheckResult(
            "isolation",
            not disturbance,
            detail=disturbance or "canaries untouched: a file, a port of the judge",
        )
    ]


RESOURCE = CheckSpec(
    name="resource",
    run=check_resources,
    failure="run",
    knobs=("resource_calls",),
    is_concurrent=True,
    asks=(
        "did it end in time, alive and within its memory; does nothing grow over many "
        "calls; do results come when they are said to"
    ),
)
ISOLATION = CheckSpec(
    name="isolation",
    run=check_isolation,
    failure="hack",
    is_concurrent=True,
    asks="did it reach for files, ports or processes outside its own",
)
