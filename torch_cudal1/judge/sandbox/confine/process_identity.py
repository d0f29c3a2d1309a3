"""Who a process is and how much it may use: user, groups, capabilities, resource limits.

A process that stays root keeps what root's number opens, capabilities or not; a user without
privileges cannot drop supplementary groups.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Collection, Mapping
from pathlib import Path

from torch_cudal1.judge.sandbox.confine import kernel

__all__ = [
    "CAP_SYS_ADMIN",
    "count_threads",
    "die_with_parent",
    "drop_privileges",
    "read_capabilities",
    "set_limits",
]

CAP_SYS_ADMIN = 21
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT = 1, 8, 24, 47
_AMBIENT_RAISE = 2


def read_capabilities() -> int:
    """The effective capabilities of this process as bits; 0 where Linux's /proc does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def drop_privileges(uid: int | None, keep: Collection[int]) -> None:
    """Give up groups, user and every capability but `keep`, for this process and all it will
    execute. Raises OSError.
    """
    before = read_capabilities()
    retained = sum(1 << number for number in keep) & before
    if before:
        for number in range(64):
            if number not in keep:
                with contextlib.suppress(
                    OSError
                ):  # EINVAL: a number beyond this kernel's; EPERM: checked below by what is left
                    kernel.prctl(_PR_CAPBSET_DROP, number)
    if uid is not None:
        kernel.prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.capset(retained, retained)
    for number in keep:
        if retained >> number & 1:
            kernel.prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, number)


def set_limits(rlimits: Mapping[str, int], processes: int) -> None:
    """Set resource limits by name, never above the hard ones in force. `processes` counts from what
    the user runs already.
    """
    limits = dict(rlimits)
    if processes:
        limits["NPROC"] = count_threads(os.getuid()) + processes
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def count_threads(uid: int) -> int:
    """How many threads a user has, as far as /proc shows them."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == uid:
                count += len(os.listdir(folder / "task"))
    return count


def die_with_parent(signal_number: int) -> None:
    """Ask for a signal when the parent dies. Linux forgets it when the user changes, so this comes
    after `drop_privileges`.
    """
    kernel.prctl(_PR_SET_PDEATHSIG, signal_number)
