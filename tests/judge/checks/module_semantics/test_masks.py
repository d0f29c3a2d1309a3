"""Another mask of the same shape matters as in eager."""

from __future__ import annotations

import pytest
import torch

from tests.judge.sources import CPU, HEAD, source_bench
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.module_semantics.masks import MASKS, shuffle_mask
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

ATTENTION = """
class {entry}(nn.Module):
    def forward(self, q, mask):
        {before}
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
"""
INPUTS = """
def get_inputs():
    return [torch.randn(2, 2, 16, 8), {mask}]

def get_init_inputs():
    return []
"""
CAUSAL = "torch.ones(16, 16).tril().bool()"


def judge(before: str, mask: str = CAUSAL) -> CheckResult:
    """What is said of a module that does this before it computes."""
    candidate = SourceCandidate(HEAD + ATTENTION.format(entry="ModelNew", before=before))
    reference = HEAD + ATTENTION.format(entry="Model", before="pass") + INPUTS.format(mask=mask)
    with (
        source_bench(reference) as bench,
        Child(make_limits(Settings(), CPU), Contract()) as child,
    ):
        trial = Trial(bench.reference, candidate, Contract(), CPU, child, bench.examples)
        trial.load("candidate", candidate)
        return list(validate(trial, checks=(NUMERICS, MASKS)).checks)[-1]


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("mask = torch.ones(mask.shape).tril().bool()", "mask 1 in another order"),
        ("assert bool(mask[0, 0])\n        assert not bool(mask[0, 1:].any())", "mask 1 in"),
        ("mask = torch.where(mask, 0.0, -torch.inf)", ""),
    ],
)
def test_the_mask_of_the_example_is_no_constant(before: str, words: str) -> None:
    check = judge(before)
    assert (check.name, check.passed) == ("perturb", not words)
    assert words in check.detail


@pytest.mark.parametrize(
    ("before", "words"),
    [
        # What PyTorch's own ways settle differently is the row itself,
        ("mask = mask | ~mask.any(-1, keepdim=True)", ""),
        # not what its neighbours yield.
        (
            "mask = mask if bool(mask.any(-1).all()) else torch.ones_like(mask)",
            "mask 1 with a row of False",
        ),
        (
            "mask = mask if int(mask.all(-1).sum()) < 2 else torch.ones_like(mask)",
            "mask 1 with a row of True",
        ),
        ("assert bool(mask.any(-1).all())", "mask 1 with a row of False"),
    ],
)
def test_a_row_of_one_value_leaves_all_others_as_they_are(before: str, words: str) -> None:
    check = judge(before)
    assert check.passed == (not words)
    assert words in check.detail


def test_a_mask_that_eager_takes_in_no_other_order_is_not_asked_for_one() -> None:
    # In any other order seven rows have no key.
    check = judge("pass", "torch.eye(16).bool()")
    assert check.passed
    assert "order" not in check.detail


def test_a_shuffled_mask_has_as_many_elements_and_no_row_of_one_value_that_had_none() -> None:
    plain = torch.arange(600).view(20, 30) % 2 < 1
    for _ in range(20):
        shuffled = shuffle_mask(plain)
        assert shuffled is not None
        assert int(shuffled.sum()) == 300
        assert not torch.equal(shuffled, plain)
        assert not shuffled.all(-1).any()
        assert shuffled.any(-1).all()
    assert shuffle_mask((torch.arange(6) < 3).expand(4, 6)) is None
    assert shuffle_mask(torch.ones(4, 6).bool()) is None
    assert shuffle_mask(torch.eye(16).bool()) is None
