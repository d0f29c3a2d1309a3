"""The numerics criterion, against float64 results."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from torch_cudal1.judge.checks.special_values import _differs_in_signs_only
from torch_cudal1.judge.reference import error_statistics
from torch_cudal1.judge.reference.compare import (
    compare,
    compare_tied_indices,
    is_grossly_equal,
    is_nearer,
    same_masks,
)
from torch_cudal1.judge.reference.float64 import measure_input_sensitivity

N = 512


@pytest.fixture(scope="module")
def product() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, their float32 product and the float64 one; float32 sums of 512 terms."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(N, N, generator=generator) for _ in range(2))
    return a, b, a @ b, a.double() @ b.double()


def _tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _bf16_high_low(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = x.bfloat16().float()
    return high, (x - high).bfloat16().float()


def _bf16x3(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (ah, al), (bh, bl) = _bf16_high_low(a), _bf16_high_low(b)
    return ah @ bh + (ah @ bl + al @ bh)


def test_another_summation_order_is_right(product) -> None:
    a, b, eager, exact = product
    split = a[:, : N // 2] @ b[: N // 2] + a[:, N // 2 :] @ b[N // 2 :]
    assert compare(split, eager, exact, longest=N).passed


@pytest.mark.parametrize("cheat", ["tf32", "bf16", "bf16x3"])
def test_fewer_bits_inside_are_refused(product, cheat: str) -> None:
    a, b, eager, exact = product
    wrong = {
        "tf32": lambda: _tf32(a) @ _tf32(b),
        "bf16": lambda: a.bfloat16().float() @ b.bfloat16().float(),
        "bf16x3": lambda: _bf16x3(a, b),
    }[cheat]()
    comparison = compare(wrong, eager, exact, longest=N)
    assert not comparison.passed
    assert comparison.ratio is not None
    assert comparison.ratio > 2


@pytest.mark.parametrize("cheat", ["tf32", "bf16"])
def test_slack_admits_more_rounding_and_no_coarser_arithmetic(product, cheat: str) -> None:
    a, b, eager, exact = product
    noisier = (exact + 3 * (eager.double() - exact)).float()
    assert not compare(noisier, eager, exact, longest=N).passed
    assert compare(noisier, eager, exact, longest=N, slack=4.0).passed
    coarse = _tf32(a) @ _tf32(b) if cheat == "tf32" else a.bfloat16().float() @ b.bfloat16().float()
    assert not compare(coarse, eager, exact, longest=N, slack=4.0).passed


def test_one_wrong_element_of_many_is_refused(product) -> None:
    _, _, eager, exact = product
    wrong = eager.clone()
    wrong[17, 200] += 1e-3
    assert not compare(wrong, eager, exact, longest=N).passed


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_limit_scales_with_the_output(product, scale: float) -> None:
    _, _, eager, exact = product
    zeros = torch.zeros_like(eager)
    assert not compare(zeros, eager * scale, exact * scale, longest=N).passed
    assert not compare(eager * scale * (1 + 1e-4), eager * scale, exact * scale, longest=N).passed


def test_a_lucky_eager_scalar_leaves_room_for_one_rounding() -> None:
    exact = torch.tensor(1.2345678, dtype=torch.float64)
    eager = exact.float()
    assert compare(torch.nextafter(eager, torch.tensor(2.0)), eager, exact, longest=1000).passed
    assert not compare(eager * (1 + 1e-5), eager, exact, longest=1000).passed


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("candidate", "eager", "exact", "passed"),
    [
        ([NAN, 1.0], [NAN, 1.0], [NAN, 1.0], True),
        ([0.0, 1.0], [NAN, 1.0], [NAN, 1.0], False),  # NaN swallowed
        ([NAN, 1.0], [0.5, 1.0], [0.5, 1.0], False),
        ([-INF, 1.0], [INF, 1.0], [INF, 1.0], False),  # sign of infinity
        ([0.5, 1.0], [INF, 1.0], [0.5, 1.0], True),  # eager overflowed inside, float64 did not
        ([INF, 1.0], [INF, 1.0], [0.5, 1.0], True),
        ([3e38, 1.0], [INF, 1.0], [1e39, 1.0], False),  # beyond the type: infinity
        (
            [INF, 1.0],
            [NAN, 1.0],
            [INF, 1.0],
            True,
        ),  # eager lost it to a difference of infinities, float64 did not
        ([INF, 1.0], [NAN, 1.0], [1e39, 1.0], True),
        ([-INF, 1.0], [NAN, 1.0], [INF, 1.0], False),
        ([INF, 1.0], [0.5, 1.0], [INF, 1.0], False),
    ],
)
def test_nan_and_infinity_follow_eager(
    candidate: list[float], eager: list[float], exact: list[float], passed: bool
) -> None:
    c, e, x = torch.tensor(candidate), torch.tensor(eager), torch.tensor(exact, dtype=torch.float64)
    assert compare(c, e, x).passed is passed
    assert same_masks(c, [e], x).passed is passed


def test_integers_and_booleans_are_exact() -> None:
    integers = torch.arange(100)
    assert compare(integers.clone(), integers, integers).passed
    assert not compare(integers + (integers == 7), integers, integers).passed
    assert not compare(integers > 50, integers > 51, integers > 51).passed


def test_another_dtype_or_shape_is_refused() -> None:
    x = torch.ones(4)
    assert not compare(x.half(), x, x.double()).passed
    assert not compare(x[:3], x, x.double()).passed


def test_without_float64_the_formats_limits_hold(product) -> None:
    a, b, eager, _ = product
    split = a[:, : N // 2] @ b[: N // 2] + a[:, N // 2 :] @ b[N // 2 :]
    assert compare(split, eager, None, longest=N).passed
    assert not compare(_tf32(a) @ _tf32(b), eager, None, longest=N).passed


def test_kernelbench_is_as_lax_as_the_benchmark_and_no_laxer(product) -> None:
    _, _, eager, exact = product
    assert compare(eager * (1 + 5e-5), eager, exact, precision="kernelbench").passed
    assert not compare(eager * (1 + 5e-3), eager, exact, precision="kernelbench").passed


def test_a_distribution_without_digits_is_no_evidence() -> None:
    exact = torch.full((5000,), 1e-9, dtype=torch.float64)
    eager = torch.zeros(5000)
    comparison = compare(torch.ones(5000) * 1e-9, eager, exact)
    assert comparison.void


class Cancelling:
    """relu(convolution) of inputs around 3: in some rows hardly anything is left of sums of 36
    terms.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = (torch.rand(8, 4, 3, 3, generator=generator) * 2 - 1) / 6
        self.x = torch.randn(2, 4, 12, 12, generator=generator) + 3
        self.exact = self.float64([self.x, self.weight])[0]
        self.eager = torch.relu(F.conv2d(self.x, self.weight, padding=1))

    def float64(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.relu(F.conv2d(inputs[0].double(), inputs[1].double(), padding=1))]

    def sum_unfolded(self) -> torch.Tensor:
        out = self.weight.flatten(1) @ F.unfold(self.x, 3, padding=1)
        return torch.relu(out).view(self.eager.shape)

    def measure_sensitivity(self) -> torch.Tensor:
        (sensitivity,) = measure_input_sensitivity(
            self.float64, [self.x, self.weight], [self.exact]
        )
        assert sensitivity is not None
        return sensitivity


def test_sums_that_cancel_are_measured_by_their_terms() -> None:
    """Another order of summing is right however little is left; without the sensitivity one set in twenty is
    refused.
    """
    refused = 0
    for case in map(Cancelling, range(200)):
        out = case.sum_unfolded()
        refused += not compare(out, case.eager, case.exact, longest=36).passed
        assert compare(
            out, case.eager, case.exact, longest=36, sensitivity=case.measure_sensitivity
        ).passed
    assert refused


def test_damage_in_a_row_that_cancels_is_refused() -> None:
    """A ten-thousandth of the terms is missing in one element of the smallest row."""
    for case in map(Cancelling, range(20)):
        rows = case.exact.reshape(-1, 12).amax(1)
        row = int(torch.where(rows > 0, rows, math.inf).argmin())
        column = int(case.exact.reshape(-1, 12)[row].argmax())
        wrong = case.sum_unfolded()
        wrong.view(-1, 12)[row, column] += 1e-4 * float(
            case.measure_sensitivity().reshape(-1, 12)[row, column]
        )
        assert not compare(
            wrong, case.eager, case.exact, longest=36, sensitivity=case.measure_sensitivity
        ).passed


def test_rows_of_other_sizes_keep_their_own_scales() -> None:
    """Small because their factors are small, not because sums cancel: nothing is forgiven there."""
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(64, N, generator=generator), torch.randn(N, 32, generator=generator)
    a[7] *= 1e-5
    eager, exact = a @ b, a.double() @ b.double()
    wrong = eager.clone()
    wrong[7] = _tf32(a[7]) @ _tf32(b)

    def float64(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [inputs[0].double() @ inputs[1].double()]

    comparison = compare(
        wrong,
        eager,
        exact,
        longest=N,
        sensitivity=lambda: measure_input_sensitivity(float64, [a, b], [exact])[0],
    )
    assert not comparison.passed
    assert "of their slice" in comparison.detail


class OneSum:
    """The sum of 65,536 normal numbers in two orders, and of what is left of them in fewer bits."""

    def __init__(self, seed: int) -> None:
        self.x = torch.randn(1, 65536, generator=torch.Generator().manual_seed(seed))
        self.eager, self.exact = self.x.sum(1), self.x.double().sum(1)

    def passes(self, out: torch.Tensor, *, terms: bool = True) -> bool:
        def measure_sensitivity() -> torch.Tensor | None:
            return measure_input_sensitivity(
                lambda inputs: [inputs[0].double().sum(1)], [self.x], [self.exact]
            )[0]

        return compare(
            out,
            self.eager,
            self.exact,
            longest=65536,
            **({"sensitivity": measure_sensitivity} if terms else {}),
        ).passed


def test_one_sum_is_measured_by_its_terms() -> None:
    """In any good order: the quotient of two errors, a draw each, is anything. Without `sway` some
    are refused.
    """
    refused = 0
    for case in map(OneSum, range(300)):
        out = case.x.view(64, 1024).sum(1).cumsum(0)[-1:]
        refused += not case.passes(out, terms=False)
        assert case.passes(out)
    assert refused


@pytest.mark.parametrize(
    "wrong", [_tf32, lambda x: x.bfloat16().float(), lambda x: x.half().float(), lambda x: x[:, 1:]]
)
def test_one_sum_of_something_else_is_refused(
    wrong: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    passed = sum(case.passes(wrong(case.x).sum(1)) for case in map(OneSum, range(300)))
    assert passed <= 6, "each may be near by chance: the sum of what is missing goes through 0"


def test_sensitivity_has_the_layout_of_the_inputs() -> None:
    """Elements that share memory move together, integers stay, and a result that cannot be had is
    none.
    """
    x = torch.randn(1, 8).expand(4, 8)
    index = torch.arange(4)

    def rows(inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        assert torch.equal(inputs[1], index)
        return [inputs[0].double()[0] - inputs[0].double()[3], inputs[0].double()[1], None]

    same, single, none = measure_input_sensitivity(rows, [x, index], [*rows([x, index])])
    assert same is not None
    assert single is not None
    assert none is None
    assert not same.any()
    assert bool((single > 0).all())
    assert float((single / x[1].abs()).max()) < 6


def test_without_memory_the_sensitivity_is_unknown() -> None:
    def full(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("none left")

    assert measure_input_sensitivity(
        full, [torch.ones(3)], [torch.ones(3, dtype=torch.float64)]
    ) == [None]


@pytest.mark.parametrize("block", [7, 1 << 17])
def test_a_rough_comparison_is_the_same_in_whatever_blocks(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setitem(error_statistics._BLOCK_ELEMENTS, "cpu", block)
    values = torch.randn(50, 3, dtype=torch.float32)
    assert is_grossly_equal(values, values * 1.009)
    assert not is_grossly_equal(values, values * 1.02)
    assert is_grossly_equal(values.half(), (values * 1.04).half())
    one_off = values.clone()
    one_off[49, 2] += 10.0
    assert not is_grossly_equal(one_off, values)
    huge = values * 1e30  # squares beyond float32, not beyond what is summed
    assert is_grossly_equal(huge, huge * 1.009)
    for share, equal in ((0.4, True), (0.6, False)):
        lost = values.clone()
        lost.view(-1)[: int(share * 150)] = math.nan
        assert is_grossly_equal(lost, lost) is equal
    assert is_grossly_equal(values[:0], values[:0])
    assert not is_grossly_equal(values, values.double())


@pytest.mark.parametrize(
    ("flipped", "passed"),
    [(0, True), (2, True), (400, False)],
)
def test_signs_of_infinities_may_turn_where_rounding_decides_them(
    flipped: int, passed: bool
) -> None:
    """What lies next to zero is scaled by infinity: 1 of 200,000 signs may be another, as between
    any two right evaluations.
    """
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(3))
    eager, exact = values * INF, values.double() * INF
    result = eager.clone()
    result[:flipped] *= -1
    assert _differs_in_signs_only(result, [eager], exact) is passed
    result[5] = 0.0
    assert not _differs_in_signs_only(result, [eager], exact)


def test_where_right_evaluations_turn_signs_a_candidate_may_turn_twice_as_many() -> None:
    values = torch.randn(1_000, generator=torch.Generator().manual_seed(3))
    eager, exact = values * INF, values.double() * INF
    rerun, result = eager.clone(), eager.clone()
    rerun[:3] *= -1
    result[10:16] *= -1
    assert _differs_in_signs_only(result, [eager, rerun], exact)
    assert not _differs_in_signs_only(result, [eager], exact)


def test_a_result_is_nearer_than_eager_where_it_keeps_digits_and_never_by_chance() -> None:
    exact = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    eager, right = exact.float() + 0.5 * noise, exact.float() * (1 + 1e-6)
    assert is_nearer(right, eager, exact)
    assert not is_nearer(eager.flip(0), eager, exact)
    assert not is_nearer(torch.zeros(4096), eager, exact)
    assert not is_nearer(exact.float() + 0.2 * noise, eager, exact)
    mask = (
        torch.rand(4096, generator=torch.Generator().manual_seed(3)) < 0.5
    )  # dropout: eager's mask and float64's differ
    assert not is_nearer(exact.float() * mask.flip(0), exact.float() * mask, exact * mask.roll(7))


def test_indices_may_differ_only_between_equal_values() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0 + 1e-12, 2.0]], dtype=torch.float64)
    first, second, third = (torch.tensor([index]) for index in (1, 2, 3))
    assert compare_tied_indices(first, second, values, 1).passed
    assert not compare_tied_indices(third, second, values, 1).passed
    assert not compare_tied_indices(
        torch.tensor([[1, 1]]), torch.tensor([[2, 1]]), values, 1
    ).passed


def test_a_few_large_errors_say_less_than_many_small_ones() -> None:
    """2.5 times eager's error is chance where two elements make up the whole, and a loss of
    precision where all do.
    """
    generator = torch.Generator().manual_seed(5)
    eager = torch.randn(8_192, generator=generator)
    errors = 1e-4 * torch.randn(8_192, generator=generator, dtype=torch.float64)
    few = torch.where(torch.arange(8_192) < 2, errors, 1e-6 * errors)
    for error, passed in ((few, True), (errors, False)):
        exact = eager.double() - error
        assert compare((exact + 2.5 * error).float(), eager, exact).passed is passed
