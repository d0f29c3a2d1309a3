"""Each failed check is one kind of failure."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.pool.failures import classify_failure

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        ("unstable", "unstable"), ("jump", "unstable"), ("compile", "compile"), ("numerics", "wrong"), ("guard_band", "wrong"),
        ("call_history", "hack"), ("wall_slope", "hack"), ("env_diff", "hack"), ("resource", "run"), ("run", "run"),
    ],
)  # fmt: skip
def test_each_check_is_one_kind_of_failure(check: str, kind: str) -> None:
    assert classify_failure(CheckResult(check, False), torch.device("cuda")) == kind


def test_on_a_cpu_that_others_use_two_clocks_that_differ_prove_no_cheat() -> None:
    assert classify_failure(CheckResult("wall_slope", False), CPU) == "unstable"
