"""The first and the last entry of what an argument indexes are as in eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.judge.sources import CPU, HEAD, source_bench
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.module_semantics.indices import (
    check_index_types,
    check_indices,
    check_left_out,
)
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

TABLE = """
class {entry}(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(300, 4)
        self.scale = nn.Parameter(torch.randn(1000))

    def forward(self, words):
        {before}
        return self.table(words) * self.scale.sum()
"""
INPUTS = """
def get_inputs():
    return [{words}]

def get_init_inputs():
    return []
"""
WORDS = "torch.randint(10, 50, (4, 6))"


def judge(
    before: str,
    words: str = WORDS,
    flops: int = 0,
    device: str = "cpu",
    check: Callable[[Trial], list[CheckResult]] = check_indices,
) -> CheckResult:
    """What is said of a module that does this before it looks up. `flops` of a call, and where."""
    candidate = SourceCandidate(HEAD + TABLE.format(entry="ModelNew", before=before))
    reference = HEAD + TABLE.format(entry="Model", before="pass") + INPUTS.format(words=words)
    with (
        source_bench(reference) as bench,
        Child(make_limits(Settings(), CPU), Contract()) as child,
    ):
        trial = Trial(bench.reference, candidate, Contract(), CPU, child, bench.examples)
        trial.load("candidate", candidate)
        numerics = validate(trial, checks=(NUMERICS,)).checks
        assert all(check.passed for check in numerics)
        heavy = replace(bench.reference, flops=flops)
        (result,) = check(replace(trial, reference=heavy, device=torch.device(device)))
        return result


@pytest.mark.parametrize(
    ("before", "words"),
    [
        # Sizes are tried from above, and eager takes no index of 999.
        ("words = words.clamp(max=298)", "index 299 in tensor"),
        ("words = words.clamp(min=1)", "index 0 in tensor"),
        ("assert int(words.max()) < 299", "index 299 in tensor"),
        ("words = words.int()", ""),
    ],
)
def test_an_end_of_the_table_that_no_example_names_is_asked_for(before: str, words: str) -> None:
    check = judge(before)
    assert (check.name, check.passed) == ("perturb", not words)
    assert words in check.detail


def test_nothing_is_written_into_an_expanded_or_an_empty_tensor() -> None:
    for words in ("torch.tensor([7]).expand(6)", "torch.zeros(0, dtype=torch.long)"):
        check = judge("words = words.clamp(max=298)", words)
        assert check.passed
        assert "not applicable" in check.detail


def test_a_host_is_not_asked_to_try_what_takes_it_long() -> None:
    cheat = "words = words.clamp(max=298)"
    assert not judge(cheat, flops=10**12).passed
    check = judge(cheat, flops=10**12, device="cuda")
    assert check.passed
    assert "too long" in check.detail


def test_the_target_that_losses_leave_out_is_asked_for_where_eager_takes_it() -> None:
    check = judge("words = words.clamp(min=1)", check=check_left_out)
    assert check.passed
    assert "no index that eager takes" in check.detail


@pytest.mark.parametrize(
    ("before", "passed"),
    [
        ("assert words.dtype == torch.int64", True),
        ("words = words * (words.itemsize // 8)", False),
    ],
)
def test_indices_of_32_bits_may_be_refused_and_must_not_be_wrong(before: str, passed: bool) -> None:
    words = "torch.randint(0, 4, (4, 6))"
    assert judge(before, words, check=check_index_types).passed == passed
