"""Numbers and flags of constructors and calls matter as in eager, in a first call and in later ones."""

from __future__ import annotations

import re

import pytest

from tests.judge.checks.module_sources import FORWARD, ModuleBench
from tests.judge.sources import CPU, HEAD, source_bench
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.module_semantics.scalars import SCALARS, list_scalars
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

POWER = """
class {entry}(nn.Module):
    def __init__(self):
        super().__init__()
        self.known = dict()

    def forward(self, x, exponent):
        {before}
        return x.abs().add(0.5).pow(exponent)
"""
INPUTS = """
def get_inputs():
    return [torch.randn(16, 16), 1.5]

def get_init_inputs():
    return []
"""


def test_each_number_and_flag_is_changed_alone() -> None:
    init = {"args": [64, 0.5, True], "kwargs": {"eps": 0.0}}
    changed = dict(list_scalars(init))
    assert [name.split(" = ")[0] for name in changed] == ["0", "1", "2", "eps"]
    count, number, flag, epsilon = changed.values()
    assert count == {"args": [65, 0.5, True], "kwargs": {"eps": 0.0}}
    assert flag == {"args": [64, 0.5, False], "kwargs": {"eps": 0.0}}
    scaled, small = number["args"][1], epsilon["kwargs"]["eps"]
    assert number == {"args": [64, scaled, True], "kwargs": {"eps": 0.0}}
    assert epsilon == {"args": [64, 0.5, True], "kwargs": {"eps": small}}
    assert 0.25 <= scaled <= 1.0
    assert scaled != 0.5
    assert 0.05 <= small <= 0.2
    assert init == {"args": [64, 0.5, True], "kwargs": {"eps": 0.0}}


def test_which_tensor_stands_in_a_call_is_no_scalar() -> None:
    call = {"dict": {"args": {"tuple": [{"tensor": 0}, 1.5]}, "kwargs": {"dict": {}}}}
    names = [name for name, _ in list_scalars(call)]
    assert [name.split(" = ")[0] for name in names] == ["1"]


def test_the_factor_of_a_number_is_a_secret() -> None:
    init = {"args": [-1.5], "kwargs": {}}
    numbers = {variant["args"][0] for _ in range(20) for _, variant in list_scalars(init)}
    assert len(numbers) > 10
    assert all(-3.0 <= number <= -0.75 for number in numbers)


def test_the_slope_of_the_example_is_refused(module_bench: ModuleBench) -> None:
    case = ({"forward": FORWARD.replace("self.slope", "0.2")}, "fast", (SCALARS,), "perturb")
    module_bench.assert_verdict(case)


def judge(before: str) -> CheckResult:
    """What is said of a module that does this before it computes."""
    candidate = SourceCandidate(HEAD + POWER.format(entry="ModelNew", before=before))
    reference = HEAD + POWER.format(entry="Model", before="pass") + INPUTS
    with (
        source_bench(reference) as bench,
        Child(make_limits(Settings(), CPU), Contract()) as child,
    ):
        trial = Trial(bench.reference, candidate, Contract(), CPU, child, bench.examples)
        trial.load("candidate", candidate)
        return list(validate(trial, checks=(NUMERICS, SCALARS)).checks)[-1]


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("exponent = 1.5", r"argument 1 = [0-9.]+: "),
        # Right in a new instance, wrong in one that has met another number.
        ("exponent = self.known.setdefault(x.shape, exponent)", r"argument 1 = [0-9.]+ later: "),
        ("self.known[x.shape] = exponent", ""),
    ],
)
def test_a_number_of_the_call_is_read_in_every_call(before: str, words: str) -> None:
    check = judge(before)
    assert (check.name, check.passed) == ("perturb", not words)
    assert re.search(words, check.detail)
