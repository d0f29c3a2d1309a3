"""How busy other processes keep this machine while something is measured here.

Whoever reads measured speed-ups must know whether the machine was idle: with every core taken, a
parallel section waits for the scheduler longer than it computes, and the same program measures
0.4x or 17x of another, from run to run.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LoadSample", "describe_other_load", "find_other_share", "sample_load"]

# From this part of the machine's processors on, what other processes used is reported.
MIN_REPORTED_SHARE = 0.25
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class LoadSample:
    """Processor seconds since the machine started: of everything that ran, of this process with the
    children that have ended, and those that all processors had to give.
    """

    busy_s: float
    command_s: float
    total_s: float


def sample_load(stat: Path = _STAT) -> LoadSample | None:
    """The counters now; None where the system does not offer them (proc(5), `cpu` line)."""
    try:
        fields = stat.read_text(encoding="ascii").splitlines()[0].split()
        user, nice, system, idle, io_wait, irq, soft_irq = (int(part) for part in fields[1:8])
    except (OSError, ValueError, IndexError):
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    busy = user + nice + system + irq + soft_irq
    usages = [
        resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    command_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return LoadSample(busy / ticks_per_s, command_s, (busy + idle + io_wait) / ticks_per_s)


def describe_other_load(before: LoadSample | None, after: LoadSample | None) -> str:
    """A sentence if other processes used much of the machine between two samples, else ""."""
    if (share := find_other_share(before, after)) is None:
        return ""
    return (
        f"Other processes used {share:.0%} of this machine's processors meanwhile, so these numbers are uncertain: "
        "measure again on an idle machine."
    )


def find_other_share(before: LoadSample | None, after: LoadSample | None) -> float | None:
    """The share of all processors that other processes used between two samples; None where it is
    less than a quarter, or not known.
    """
    if before is None or after is None or after.total_s <= before.total_s:
        return None
    elsewhere_s = (after.busy_s - before.busy_s) - (after.command_s - before.command_s)
    share = elsewhere_s / (after.total_s - before.total_s)
    return share if share >= MIN_REPORTED_SHARE else None
