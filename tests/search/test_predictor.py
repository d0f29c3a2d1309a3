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
from torch_cudal1.search.cost_model.predictor import CostModel, fit_cost_model, pairwise_rank_error
from torch_cudal1.search.cost_model.timings import KernelTiming


def test_the_model_orders_an_unseen_fusion_groups_kernels_as_the_machine_does_and_the_bound_does_not() -> (
    None
):
    held_out = SIZES[5]
    model = fit_cost_model(timings([one for one in SIZES if one != held_out]), "gemm")
    assert isinstance(model, CostModel)
    subject, found = features_of(*held_out), family(*held_out)
    times, bounds, guesses = (
        torch.tensor(one, dtype=torch.float64).log2()
        for one in (
            [took_us(subject, one) for one in found],
            [subject.lower_bound_us(one) for one in found],
            [guess.us for guess in model.predict(subject, found)],
        )
    )
    alone = torch.zeros(len(found), dtype=torch.long)
    assert pairwise_rank_error(times, guesses, alone) < 0.5 * pairwise_rank_error(
        times, bounds, alone
    )


def test_a_machine_that_does_as_the_bound_says_needs_no_model() -> None:
    exact = [replace(one, us=one.bound_us) for one in timings()]
    assert isinstance(fit_cost_model(exact, "gemm"), Refusal)


def test_times_that_nothing_explains_are_no_model() -> None:
    dice = random.Random(5)
    noise = [replace(one, us=one.bound_us * 2 ** dice.uniform(-0.1, 0.1)) for one in timings()]
    assert isinstance(fit_cost_model(noise, "gemm"), Refusal)


@pytest.mark.parametrize(
    ("few", "why"),
    [(timings(SIZES[:5]), "5 fusion groups"), (timings()[:20], "20 timings"), ([], "0 timings")],
)
def test_of_too_few_timings_nothing_is_claimed(few: list[KernelTiming], why: str) -> None:
    found = fit_cost_model(few, "gemm")
    assert isinstance(found, Refusal)
    assert why in found.reason


def test_a_family_without_timings_is_unknown() -> None:
    assert isinstance(fit_cost_model(timings(), "conv"), Refusal)


def test_a_method_that_was_never_measured_has_its_bound_and_no_certainty() -> None:
    known = [one for one in timings() if one.config["method"] != "packed-f16x3"]
    model = fit_cost_model(known, "gemm")
    assert isinstance(model, CostModel)
    subject = features_of(4096, 2048, 4096)
    strange = [one for one in family(4096, 2048, 4096) if one.config["method"] == "packed-f16x3"]
    assert {guess.factor for guess in model.predict(subject, strange)} == {math.inf}
    assert math.isinf(subject.lower_bound_us(Proposal("gemm", {"method": "nonsense"})))


def test_disorder_is_none_for_the_right_order_all_for_the_reverse_half_for_no_order() -> None:
    times, alone = torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3, dtype=torch.long)
    assert [pairwise_rank_error(times, one, alone) for one in (times, -times, torch.ones(3))] == [
        0.0,
        1.0,
        0.5,
    ]
