"""The comparison rejects what is wrong and accepts what is as accurate as eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.compare import LIMIT, Comparison, Reference, compare, make_reference

ROWS = 256


@pytest.fixture
def product() -> tuple[Tensor, Tensor, Reference]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(ROWS, ROWS, generator=generator) for _ in range(2))
    return a, b, make_reference({"y": a.double() @ b.double()}, [{"y": a @ b}])


def _bf16(a: Tensor, b: Tensor) -> Tensor:
    return (a.bfloat16() @ b.bfloat16()).float()


def _tf32(a: Tensor, b: Tensor) -> Tensor:
    """Ten bits of mantissa, as a tensor core reads float32."""
    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    return cut[0] @ cut[1]


def _one_unwritten(a: Tensor, b: Tensor) -> Tensor:
    y = a @ b
    y[17, 3] = 0.0
    return y


def _nan(a: Tensor, b: Tensor) -> Tensor:
    y = a @ b
    y[0, 0] = torch.nan
    return y


WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros": lambda a, b: torch.zeros(ROWS, ROWS),
    "the other order": lambda a, b: b @ a,
    "bf16 operands": _bf16,
    "tf32 operands without the right": _tf32,
    "one element of 65,536 unwritten": _one_unwritten,
    "a NaN": _nan,
    "another dtype": lambda a, b: a.double() @ b.double(),
    "another shape": lambda a, b: (a @ b)[:-1],
    "an infinity": lambda a, b: (a @ b).index_fill(0, torch.tensor([0]), torch.inf),
}
RIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eager": lambda a, b: a @ b,
    "split-K": lambda a, b: a[:, :128] @ b[:128] + a[:, 128:] @ b[128:],
    "float64 rounded": lambda a, b: (a.double() @ b.double()).float(),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_fail(name: str, product: tuple[Tensor, Tensor, Reference]) -> None:
    a, b, ref = product
    verdict = compare({"y": WRONG[name](a, b)}, ref)
    assert not verdict.passed
    assert verdict.reason.startswith("y:")


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_pass(name: str, product: tuple[Tensor, Tensor, Reference]) -> None:
    a, b, ref = product
    verdict = compare({"y": RIGHT[name](a, b)}, ref)
    assert verdict.passed
    assert verdict.error_ratio is not None
    assert verdict.error_ratio <= LIMIT


def test_the_ratio_is_in_units_of_eagers_error(product: tuple[Tensor, Tensor, Reference]) -> None:
    a, b, ref = product
    error = (a @ b).double() - ref.exact["y"]
    tripled = compare({"y": (ref.exact["y"] + 3 * error).float()}, ref)
    assert tripled.error_ratio == pytest.approx(3.0, rel=0.05)
    assert not tripled.passed


def test_where_eager_is_exact_one_round_off_is_allowed_and_no_more() -> None:
    exact = torch.linspace(1, 2, 1000)
    ref = make_reference({"y": exact.double()}, [{"y": exact}])
    half_ulp = exact + exact * 2.0**-25
    assert compare({"y": half_ulp}, ref).passed
    assert not compare({"y": exact * (1 + 2.0**-22)}, ref).passed


def test_an_output_without_digits_is_void_but_not_free() -> None:
    """The gradient of a key's bias is zero in exact arithmetic: eager's own value is noise."""
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-8
    ref = make_reference({"y": torch.zeros(1000).double()}, [{"y": noise}])
    verdict = compare({"y": 3 * noise}, ref)
    assert (verdict.passed, verdict.void, verdict.error_ratio) == (True, 1, None)
    assert not compare({"y": torch.ones(1000)}, ref).passed


def test_the_largest_of_several_eager_runs_is_the_unit() -> None:
    exact = torch.ones(8).double()
    runs = [{"y": torch.ones(8)}, {"y": torch.ones(8) * 1.001}]
    assert make_reference({"y": exact}, runs).eager_rms["y"] == pytest.approx(1e-3, rel=1e-3)


def test_an_error_of_few_elements_may_be_as_far_from_eagers_as_that_of_a_small_result() -> None:
    """After a ReLU two elements of 640 are left, and of these eager's error is one lucky draw of
    two.
    """
    exact = torch.zeros(640)
    exact[:2] = torch.tensor([0.11, 0.21])
    eager, other = exact.clone(), exact.clone()
    eager[0], eager[1] = eager[0] + 6e-8, eager[1] - 2e-8
    other[0], other[1] = other[0] - 9e-8, other[1] + 1.9e-7
    ref = make_reference({"y": exact.double()}, [{"y": eager}])
    verdict = compare({"y": other}, ref)
    assert verdict.passed
    assert verdict.error_ratio is not None
    assert verdict.error_ratio > LIMIT * 1.5
    assert not compare({"y": exact + 1e-6}, ref).passed
    dense = make_reference({"y": exact.double()}, [{"y": exact + 6e-8}])
    assert not compare({"y": exact + 2e-7}, dense).passed


def test_nan_where_eager_has_nan_is_right() -> None:
    y = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    ref = make_reference({"y": y.double()}, [{"y": y}])
    assert compare({"y": y.clone()}, ref).passed
    assert not compare({"y": y.nan_to_num(0.0)}, ref).passed
    assert not compare({"y": torch.tensor([1.0, torch.nan, -torch.inf, -torch.inf])}, ref).passed


def test_integers_must_be_equal() -> None:
    y = torch.arange(5)
    ref = make_reference({"y": y}, [{"y": y}])
    assert compare({"y": y.clone()}, ref).passed
    assert not compare({"y": y + 1}, ref).passed


def test_a_missing_output_fails(product: tuple[Tensor, Tensor, Reference]) -> None:
    assert not compare({}, product[2]).passed


def test_two_verdicts_keep_the_worse_of_both() -> None:
    both = Comparison(True, 0.5, "", 1, 0) + Comparison(False, 3.0, "y: bad", 2, 1)
    assert both == Comparison(False, 3.0, "y: bad", 3, 1)
