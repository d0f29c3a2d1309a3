"""Rows of one sign and size show an error that is small among values of one."""

from __future__ import annotations

import pytest
import torch

from tests.judge.sources import CPU, HEAD, source_bench
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.regimes import _BANDS, REGIMES, _make_bands, _RowErrors
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

MODULE = """
class {entry}(nn.Module):
    def forward(self, x):
        {body}
"""
INPUTS = "\ndef get_inputs():\n    return [{inputs}]\n\ndef get_init_inputs():\n    return []\n"
MATRIX = "torch.randn(32, 16)"


def make_reference(body: str, inputs: str = MATRIX) -> str:
    return HEAD + MODULE.format(entry="Model", body=body) + INPUTS.format(inputs=inputs)


def judge(
    reference: str,
    body: str,
    contract: Contract | None = None,
    *,
    inputs: str = MATRIX,
) -> CheckResult:
    """What `regimes` says of a module with this body."""
    candidate = SourceCandidate(HEAD + MODULE.format(entry="ModelNew", body=body))
    terms = contract or Contract()
    with (
        source_bench(make_reference(reference, inputs)) as bench,
        Child(make_limits(Settings(), CPU), terms) as child,
    ):
        trial = Trial(bench.reference, candidate, terms, CPU, child, bench.examples)
        trial.load("candidate", candidate)
        return list(validate(trial, checks=(NUMERICS, REGIMES)).checks)[-1]


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        (
            "return x * torch.sigmoid(x)",
            "y = x * torch.sigmoid(x); return torch.where((x < -7) & (x > -40), 0 * y, y)",
            "for inputs from -",
        ),
        (
            "return nn.functional.leaky_relu(x)",
            "y = nn.functional.leaky_relu(x); return torch.where((x < -200) & (x > -900), 0 * y, y)",
            "for inputs from -",
        ),
    ],
)
def test_an_error_of_all_of_a_small_value_is_refused(
    reference: str, candidate: str, words: str
) -> None:
    # `numerics` draws large values, too, and by chance meets the error first; not each time.
    checks = (judge(reference, candidate) for _ in range(4))
    check = next((check for check in checks if check.name == "regimes"), None)
    assert check is not None
    assert not check.passed
    assert words in check.detail


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        ("return x * torch.sigmoid(x)", "return x / (1 + torch.exp(-x))"),
        # Far below zero the value is next to nothing, and 1 + exp(x) is one.
        (
            "return nn.functional.softplus(x)",
            "return x.clamp_min(0) + (1 + (-x.abs()).exp()).log()",
        ),
        ("return torch.sigmoid(x)", "return 0.5 * torch.tanh(0.5 * x) + 0.5"),
        # Eager's own tail cancels, and has no digits left.
        (
            "return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))",
            "return nn.functional.gelu(x.double()).float()",
        ),
        # A row of sums that cancel: only rounding is left.
        (
            "return x - x.mean(1, keepdim=True)",
            "return x - x.double().mean(1, keepdim=True).float()",
        ),
        # What rounding decides may fall on either side.
        ("return torch.round(x * 3 / 3)", "return torch.round(x)"),
        ("return torch.softmax(x, 1)", "return torch.softmax(x.double(), 1).float()"),
    ],
)
def test_an_honest_formula_passes(reference: str, candidate: str) -> None:
    check = judge(reference, candidate)
    assert check.passed, check


def test_an_input_of_few_rows_gets_several_sets() -> None:
    body = "return x * torch.sigmoid(x)"
    check = judge(body, body, inputs="torch.randn(64)")
    assert check.passed
    assert check.detail.count("rows of one sign and size") == 4


@pytest.mark.parametrize(
    ("contract", "inputs", "words"),
    [
        (Contract(precision="kernelbench"), MATRIX, "KernelBench's flat tolerance"),
        (Contract(), "torch.randint(0, 9, (8, 8))", "no floating input"),
    ],
)
def test_where_there_is_nothing_to_ask_it_says_so(
    contract: Contract, inputs: str, words: str
) -> None:
    body = "return x * 2.0"
    check = judge(body, body, contract, inputs=inputs)
    assert check.passed
    assert words in check.detail


def test_a_row_has_one_sign_and_one_size() -> None:
    strided = torch.empty(8, 40).t()
    rows = _make_bands(strided, _BANDS, is_positive=False)
    assert rows.stride() == strided.stride()
    sizes = {
        round(float(low), 9)
        for low in rows.abs().log2().floor().exp2().amin(1) * rows.sign().amin(1)
    }
    assert sizes == {round(band, 9) for band in _BANDS}
    assert bool((rows.abs().amax(1) <= 2 * rows.abs().amin(1)).all())
    assert bool((_make_bands(torch.empty(40, 8), _BANDS, is_positive=True) > 0).all())
    assert _make_bands(torch.empty(()), _BANDS, is_positive=False).shape == ()


def test_a_nan_is_an_error_and_an_infinite_row_is_for_another_check() -> None:
    eager = torch.tensor([[1.0, 1.0], [float("inf"), 1.0], [0.0, 0.0]])
    errors = _RowErrors(eager * torch.tensor([[float("nan")], [2.0], [1.0]]), eager, eager)
    assert errors.exceed(torch.full((3,), 0.1)).tolist() == [True, False, False]
