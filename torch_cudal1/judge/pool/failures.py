"""What kind of failure a check of the judge's is for a policy: it learns from the kind, and hacks
are counted by it.
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
# requests to the candidate's process, whose name a failure has where nothing else noticed it
_REQUESTS = frozenset(("put", "spin", "soak", "reenter", "poisoned", "banded"))


def classify_failure(check: CheckResult, device: torch.device) -> Failure:
    """What kind of failure a failed check is: a cheat, a wrong result, one that did not run, or a
    measurement without a score.

    On a CPU two clocks differ by whatever else runs there, so `wall_slope` proves no cheat; without
    a score it stays all the same.
    """
    if check.name == "wall_slope" and device.type == "cpu":
        return "unstable"
    if check.name == "compile":
        return "compile"
    if check.name in _REQUESTS or check.name.startswith("load"):
        return "run"
    return _KINDS.get(check.name, "wrong")
