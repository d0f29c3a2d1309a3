"""What a NaN does not reach must be right, and is compared without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.judge.checks.module_sources import ModuleBench, ModuleCase
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.checks.finite_values import compare_finite_elements
from torch_cudal1.judge.checks.special_values import SPECIAL
from torch_cudal1.judge.reference.compare import Comparison

NAN, INF = float("nan"), float("inf")


def compare(
    out: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor | None = None,
    with_tf32: torch.Tensor | None = None,
) -> Comparison:
    trial: Any = SimpleNamespace(
        contract=Contract(),
        facts=SimpleNamespace(longest_reduction=1),
        reference=SimpleNamespace(
            eager_with_tf32=lambda inputs: None if with_tf32 is None else [with_tf32]
        ),
    )
    sample: Any = SimpleNamespace(
        inputs=[],
        expected=SimpleNamespace(outputs=[eager]),
        get_exact=lambda position: eager.double() if exact is None else exact,
    )
    return compare_finite_elements(trial, sample, 0, out)


@pytest.fixture
def eager() -> torch.Tensor:
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    values[5, 2], values[9, 1] = NAN, INF
    return values


def test_elements_that_are_not_finite_are_not_compared(eager: torch.Tensor) -> None:
    assert compare(eager.clone(), eager).passed
    out = eager.clone()
    out[5, 2] = 3.0
    assert compare(out, eager).passed


@pytest.mark.parametrize("row", [0, 5, 63])
def test_a_row_of_zeros_beside_a_nan_is_wrong(eager: torch.Tensor, row: int) -> None:
    out = torch.cat([eager[:row], 0 * eager[row : row + 1].nan_to_num(0.0), eager[row + 1 :]])
    assert not compare(out, eager).passed


def test_one_percent_everywhere_is_wrong(eager: torch.Tensor) -> None:
    assert not compare(eager * 1.01, eager).passed


def test_eagers_own_error_is_allowed(eager: torch.Tensor) -> None:
    # Sums that cancel: eager is as far from float64 as the result is.
    exact = eager.double() * (1 + 1e-3 * torch.randn(64, 8).double())
    noise = exact * (1 + 1e-3 * torch.randn(64, 8).double())
    assert compare(noise.float(), eager, exact).passed
    assert not compare(noise.float(), eager).passed


def test_tf32_is_allowed_where_the_contract_grants_it(eager: torch.Tensor) -> None:
    rounded = eager * (1 + 3e-4 * torch.randn(64, 8))
    assert not compare(rounded, eager).passed
    assert compare(rounded, eager, with_tf32=eager * (1 + 3e-4 * torch.randn(64, 8))).passed


def test_integers_and_empty_results_have_nothing_to_compare() -> None:
    assert compare(torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)).passed
    assert compare(torch.empty(0, 4), torch.empty(0, 4)).passed
    assert not compare(torch.tensor(1.5), torch.tensor(1.0)).passed


MODULES: dict[str, ModuleCase] = {
    "another formula where a NaN is met": (
        {"result": "self.plain(x, y) * (0.9 if bool((x + y).isnan().any()) else 1.0)"},
        "fast",
        (SPECIAL,),
        "special",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_source_that_is_wrong_beside_a_nan_is_refused(
    module_bench: ModuleBench, name: str
) -> None:
    module_bench.assert_verdict(MODULES[name])
