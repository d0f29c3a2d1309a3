"""Two processes on one core while they are timed, so that what slows its host's side down slows
both of them.

Launching a GPU's kernels of microseconds takes longer than they do, and what a launch costs depends
on the core: its clock, its sibling, who else is there. Sides in two processes have two cores for as
long as a benchmark lasts, and beside other work one kernel was 1.5 times as fast as itself. They
never run at once, so they can share one. Which one changes from bucket to bucket: what a core is
like is noise then, which intervals show.

It measures nothing. Where the system does not let it, cores stay as they are, and `shared` says so.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SameCore", "find_descendants", "share_core"]
_CHANCE = random.SystemRandom()  # a process that measures keeps the user's generators as they are

_PROC = Path("/proc")
_LEAST_BUSY = 2  # one of the idler half: in the other half another program may take half of a core


class SameCore:
    """The threads of some processes and of all that they started. `shared`: whether they are on one
    core now.
    """

    def __init__(self, leaders: Sequence[int]) -> None:
        # The process that computes may be a descendant of the one that confines it.
        self._processes = [pid for leader in leaders for pid in (leader, *find_descendants(leader))]
        self._allowed = os.sched_getaffinity(0)
        self._busy = _read_busy_ticks()
        self.shared = False

    def move(self) -> bool:
        """To another core, one of those with the least work since the last move; whether they are
        on it.
        """
        before, self._busy = self._busy, _read_busy_ticks()
        idlest = sorted(
            self._allowed,
            # Random among equals: a fixed order would take the same core each time.
            key=lambda core: (self._busy.get(core, 0) - before.get(core, 0), _CHANCE.random()),
        )
        core = _CHANCE.choice(idlest[: max(1, len(idlest) // _LEAST_BUSY)])
        self.shared = all(_pin_process(pid, {core}) for pid in self._processes)
        if not self.shared:
            self.release()  # one side alone on a core is worse than none
        return self.shared

    def release(self) -> None:
        """Allow all cores to all threads again, of the processes that still live."""
        for pid in self._processes:
            _pin_process(pid, self._allowed)
        self.shared = False


@contextmanager
def share_core(leaders: Sequence[int]) -> Iterator[SameCore | None]:
    """For the body; None where processes have no cores that can be set."""
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    pinned = SameCore(leaders)
    try:
        yield pinned
    finally:
        pinned.release()


def _pin_process(pid: int, cores: set[int]) -> bool:
    """Whether all threads of a process may run on these cores only."""
    try:
        # `sched_setaffinity` acts on one thread only: there is no call for a process.
        for thread in os.listdir(_PROC / str(pid) / "task"):
            _pin_thread(int(thread), cores)
    except OSError:  # another user's process, or not there any more
        return False
    return True


def _pin_thread(thread: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:  # it has just ended
        return


def find_descendants(leader: int) -> list[int]:
    """Processes that `leader` started, and all that these started; none where the system does not
    tell.
    """
    parents: dict[int, int] = {}
    for entry in os.listdir(_PROC) if _PROC.is_dir() else ():
        if entry.isdigit():
            try:
                parents[int(entry)] = int(
                    # The second field is the program's name in parentheses, which may hold spaces
                    # and parentheses itself.
                    (_PROC / entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except (OSError, IndexError):  # it has just ended
                continue
    descendants, waiting = list[int](), [leader]
    while waiting:
        above = waiting.pop()
        new = [pid for pid, parent in parents.items() if parent == above]
        descendants += new
        waiting += new
    return descendants


def _read_busy_ticks() -> dict[int, int]:
    """What each core has worked so far; nothing where the system does not tell."""
    try:
        lines = (_PROC / "stat").read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines if line.startswith("cpu") and line[3:4].isdigit()]
    return {
        # The fourth and fifth number are idle and waiting for input or output: not work.
        int(name[3:]): sum(map(int, times)) - int(times[3]) - int(times[4])
        for name, *times in fields
    }
