"""Maps a failed check to a kind of failure, from which a policy learns, and by which hacks are
counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.registry import CHECK_NAMES
from torch_cudal1.judge.checks.spec import FailureKind
from torch_cudal1.judge.pool.measured import Failure

__all__ = ["classify_failure"]

_KINDS: Mapping[str, FailureKind] = {check.name: check.failure for check in CHECK_NAMES}
# Requests to the candidate's process: a failure has the name of its request where no check noticed
# it.
_REQUESTS = frozenset(("put", "spin", "soak", "unlike", "reenter", "poisoned", "banded"))


def classify_failure(check: CheckResult, device: torch.device) -> Failure:
    """The kind of a failed check: a cheat, a wrong result, a program that did not run, or a
    measurement without a score.
    """
    # On a CPU other programs make two clocks differ, so this proves no cheat. There is no score all
    # the same.
    if check.name == "wall_slope" and device.type == "cpu":
        return "unstable"
    if check.name == "compile":
        return "compile"
    if check.name in _REQUESTS or check.name.startswith("load"):
        return "run"
    return _KINDS.get(check.name, "wrong")
