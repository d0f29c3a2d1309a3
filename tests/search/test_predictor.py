"""The cost model: better than the bound on fusion groups it has not seen, or it says that it is not
known.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from tests.search.kernel_cases import SIZES, family, features_of, timings, took_us
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.predictor import CostModel, fit_cost_model, measure_rank_error
from torch_cudal1.search.cost_model.timings import KernelTiming


def test_the_model_orders_an_unseen_fusion_groups_kernels_as_the_machine_does_and_the_bound_does_not() -> (
    None
):
    held_out = SIZES[5]
    model = fit_cost_model(timings([size for size in SIZES if size != held_out]), "gemm")
    assert isinstance(model, CostModel)
    subject, proposals = features_of(*held_out), family(*held_out)
    times, bounds, guesses = (
        torch.tensor(row, dtype=torch.float64).log2()
        for row in (
            [took_us(subject, row) for row in proposals],
            [subject.lower_bound_us(row) for row in proposals],
            [guess.us for guess in model.predict(subject, proposals)],
        )
    )
    alone = torch.zeros(len(proposals), dtype=torch.long)
    assert measure_rank_error(times, guesses, alone) < 0.5 * measure_rank_error(
        times, bounds, alone
    )


def test_a_machine_that_does_as_the_bound_says_needs_no_model() -> None:
    exact = [replace(timing, us=timing.bound_us) for timing in timings()]
    assert isinstance(fit_cost_model(exact, "gemm"), Refusal)


def test_times_that_nothing_explains_are_no_model() -> None:
    dice = random.Random(5)
    noise = [
        replace(timing, us=timing.bound_us * 2 ** dice.uniform(-0.1, 0.1)) for timing in timings()
    ]
    assert isinstance(fit_cost_model(noise, "gemm"), Refusal)


@pytest.mark.parametrize(
    ("few", "why"),
    [(timings(SIZES[:5]), "5 fusion groups"), (timings()[:20], "20 timings"), ([], "0 timings")],
)
def test_of_too_few_timings_nothing_is_claimed(few: list[KernelTiming], why: str) -> None:
    model = fit_cost_model(few, "gemm")
    assert isinstance(model, Refusal)
    assert why in model.reason


def test_a_family_without_timings_is_unknown() -> None:
    assert isinstance(fit_cost_model(timings(), "conv"), Refusal)


def test_a_method_that_was_never_measured_has_its_bound_and_no_certainty() -> None:
    measured = [timing for timing in timings() if timing.config["method"] != "packed-f16x3"]
    model = fit_cost_model(measured, "gemm")
    assert isinstance(model, CostModel)
    subject = features_of(4096, 2048, 4096)
    strange = [
        proposal
        for proposal in family(4096, 2048, 4096)
        if proposal.config["method"] == "packed-f16x3"
    ]
    assert {guess.factor for guess in model.predict(subject, strange)} == {math.inf}
    assert math.isinf(subject.lower_bound_us(Proposal("gemm", {"method": "nonsense"})))


def test_disorder_is_none_for_the_right_order_all_for_the_reverse_half_for_no_order() -> None:
    times, alone = torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3, dtype=torch.long)
    assert [
        measure_rank_error(times, order, alone) for order in (times, -times, torch.ones(3))
    ] == [
        0.0,
        1.0,
        0.5,
    ]
