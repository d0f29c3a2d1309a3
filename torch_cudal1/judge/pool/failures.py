"""What kind of failure a check of the judge's is for a policy: it learns from the kind, and hacks
are counted by it.
"""

from __future__ import annotations

import torch

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.pool.measured import Failure

__all__ = ["failure_of"]

_CHEATS = frozenset(
    (
        *(
            "env_diff",
            "fresh_output",
            "call_history",
            "impostor",
            "ghost",
            "isolation",
            "protocol",
            "stream_order",
            "state_dict",
        ),
        *("timing_state", "sync_ratio", "wall_slope", "timed_output", "roofline"),
    )
)
_BROKE = frozenset(
    ("resource", "run", "load", "put", "spin", "soak", "reenter", "poisoned", "banded", "timing")
)


def failure_of(check: Check, device: torch.device) -> Failure:
    """What kind of failure a failed check is: a cheat, a wrong result, one that did not run, or a
    measurement without a score.

    On a CPU two clocks differ by whatever else runs there, so `wall_slope` proves no cheat; without
    a score it stays all the same.
    """
    if check.name in ("unstable", "jump") or (check.name == "wall_slope" and device.type == "cpu"):
        return "unstable"
    if check.name in ("compile", "contract"):
        return "compile"
    if check.name in _CHEATS:
        return "hack"
    return "run" if check.name in _BROKE or check.name.startswith("load") else "wrong"
