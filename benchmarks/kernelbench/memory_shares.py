"""How the GPU's memory is rationed among tasks: who may have how much now. Pure functions of the
tasks that run.

A task of up to 5 % of the memory is small. Large tasks leave some memory to small ones, so that a
large task waits for other large ones and hardly ever for the many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.kernelbench.task_runs import TaskRun

__all__ = ["has_enough_large_waiting", "is_small", "limit_request", "size_grant"]

# more large tasks that wait for memory at once would take every process from small ones
_MAX_LARGE_WAITING = 2
# of the memory: what a small task takes at most, and what is kept free for all of them
_MAX_SMALL_SHARE, _MAX_FREE_FOR_SMALL_SHARE = 0.05, 0.35
# a task of unknown size gets this part of the memory; one that runs short is tried again alone
_UNKNOWN_SIZE_DIVISOR = 4


def is_small(size_bytes: int, memory_bytes: int) -> bool:
    """Whether a request is one of a small task."""
    return size_bytes <= _MAX_SMALL_SHARE * memory_bytes


def limit_request(size_bytes: int | None, memory_bytes: int, *, alone: bool) -> int:
    """What a task is taken to need: all memory if it runs alone, a guess where it does not know."""
    if alone:
        return memory_bytes
    guess = memory_bytes // _UNKNOWN_SIZE_DIVISOR if size_bytes is None else size_bytes
    return min(guess, memory_bytes)


def has_enough_large_waiting(runs: Sequence[TaskRun], memory_bytes: int) -> bool:
    """Whether as many large tasks wait for memory as may."""
    requests = [run.requested_bytes for run in runs if run.waits == "memory" and not run.alone]
    large = [size for size in requests if size is not None and not is_small(size, memory_bytes)]
    return len(large) >= _MAX_LARGE_WAITING


def size_grant(task_run: TaskRun, runs: Sequence[TaskRun], memory_bytes: int) -> int | None:
    """The bytes that a waiting task may have now, None while it must wait on.

    What other waiting tasks hold counts as taken. A large task runs with less than it asked for
    where it asked for more than there can be.
    """
    assert task_run.requested_bytes is not None
    small = is_small(task_run.requested_bytes, memory_bytes)
    other_runs = [other for other in runs if other is not task_run]
    waiting_bytes = sum(other.granted_bytes for other in other_runs if other.waits == "memory")
    reserved = 0 if task_run.alone or small else _count_bytes_for_small(runs, memory_bytes)
    free = max(0, memory_bytes - waiting_bytes - reserved)
    size = min(task_run.requested_bytes, free)
    working = [other.granted_bytes for other in other_runs if other.waits != "memory"]
    working_bytes = sum(
        granted
        for granted in working
        if small or task_run.alone or not is_small(granted, memory_bytes)
    )
    return size if size <= free - working_bytes else None


def _count_bytes_for_small(runs: Sequence[TaskRun], memory_bytes: int) -> int:
    """What large tasks leave free: as much as small tasks have or want, and at least the share of
    one for the next that comes.
    """
    sizes = (run.requested_bytes if run.waits == "memory" else run.granted_bytes for run in runs)
    small = sum(size for size in sizes if size is not None and is_small(size, memory_bytes))
    largest = _MAX_FREE_FOR_SMALL_SHARE * memory_bytes
    return int(min(max(small, _MAX_SMALL_SHARE * memory_bytes), largest))
