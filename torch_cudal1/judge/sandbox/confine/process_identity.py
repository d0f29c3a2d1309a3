"""A process's user, groups, capabilities and resource limits.

A process that keeps user id 0 may open what root owns, even without capabilities. A user without
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
    """The effective capabilities of this process as bits; 0 where /proc does not show them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def drop_privileges(uid: int | None, keep: Collection[int]) -> None:
    """Drop supplementary groups, change to user `uid` unless it is None, and drop all capabilities
    but `keep`; for this process and every program that it executes. Raises OSError.
    """
    before = read_capabilities()
    retained = sum(1 << number for number in keep) & before
    if before:
        # A capability in the bounding set could come back by executing a file that has it.
        for number in range(64):
            if number not in keep:
                with contextlib.suppress(OSError):
                    # EINVAL: a number that this kernel does not have. EPERM without CAP_SETPCAP;
                    # `capset` below drops the capability itself all the same.
                    kernel.prctl(_PR_CAPBSET_DROP, number)
    if uid is not None:
        # Otherwise setresuid away from 0 clears the permitted capabilities, `keep` included.
        kernel.prctl(_PR_SET_KEEPCAPS, 1)
        # Groups before the user: setgroups and setresgid need capabilities that setresuid takes
        # away.
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # An ambient capability must be permitted and inheritable.
    kernel.capset(retained, retained)
    for number in keep:
        if retained >> number & 1:
            # A user other than root keeps a capability over execve only if it is ambient.
            kernel.prctl(_PR_CAP_AMBIENT, _AMBIENT_RAISE, number)


def set_limits(rlimits: Mapping[str, int], processes: int) -> None:
    """Set resource limits by name, never above the hard limits in force.

    `processes`: threads allowed beyond those that the user has now; 0: no limit.
    """
    limits = dict(rlimits)
    if processes:
        # RLIMIT_NPROC counts all threads of the user, those of other programs too.
        limits["NPROC"] = count_threads(os.getuid()) + processes
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        # Raising a hard limit needs CAP_SYS_RESOURCE.
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def count_threads(uid: int) -> int:
    """How many threads a user has, as far as /proc shows them."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # A process may end between the listing and the look.
            if folder.stat().st_uid == uid:
                count += len(os.listdir(folder / "task"))
    return count


def die_with_parent(signal_number: int) -> None:
    """Have Linux send this process a signal when its parent dies.

    Call it after `drop_privileges`: Linux clears the setting when the user changes.
    """
    kernel.prctl(_PR_SET_PDEATHSIG, signal_number)
