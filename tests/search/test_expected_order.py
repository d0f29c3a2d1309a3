"""Which proposals are compiled: the model's, some of the family's own, and without a model those of
today.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.search.kernel_cases import SIZES, family, features_of, timings, took_us
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.kernels.features import KernelFeatures
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.predictor import CostModel, Prediction, fit_cost_model
from torch_cudal1.search.evolution.expected_order import (
    EXPLORED_FRACTION,
    is_hopeless,
    select_proposals,
)

HELD_OUT = (4096, 2048, 4096)
BEST_FIRST = tuple(Proposal("gemm", {"at": at}) for at in range(12))
SOME = KernelFeatures("gemm", {"m": 1}, 1.0)


class Liar(CostModel):
    """A model that has it all the other way round, and is sure of it."""

    def __init__(self) -> None:
        pass

    def predict(self, features: KernelFeatures, proposals: Sequence[Proposal]) -> list[Prediction]:
        return [Prediction(100.0 * 4.0 ** -proposal.number("at", 0), 1.0) for proposal in proposals]


def test_without_a_model_the_order_is_todays() -> None:
    assert select_proposals(BEST_FIRST, SOME, Refusal("no timings"), 4) == BEST_FIRST[:4]


def test_with_one_an_unseen_fusion_groups_fastest_kernels_are_chosen() -> None:
    model = fit_cost_model(timings([size for size in SIZES if size != HELD_OUT]), "gemm")
    assert isinstance(model, CostModel)
    subject, proposals = features_of(*HELD_OUT), family(*HELD_OUT)
    best = {proposal: took_us(subject, proposal) for proposal in proposals}
    picked = select_proposals(proposals, subject, model, 4)
    assert min(best[proposal] for proposal in picked) == min(best.values())
    assert sum(best[proposal] for proposal in picked[:3]) < sum(
        best[proposal] for proposal in proposals[:3]
    )


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_model_that_lies_leaves_the_familys_own_best_among_those_measured(count: int) -> None:
    picked = select_proposals(BEST_FIRST, SOME, Liar(), count)
    assert BEST_FIRST[0] in picked
    assert len(picked) <= count
    assert len(set(picked) & set(BEST_FIRST[:count])) >= max(1, round(EXPLORED_FRACTION * count))


def test_what_is_slower_for_sure_is_not_compiled_and_what_may_not_be_is() -> None:
    best = Prediction(10.0, 1.1)
    assert is_hopeless(Prediction(30.0, 1.1), best)
    assert not is_hopeless(Prediction(30.0, 2.0), best)
    assert not is_hopeless(Prediction(12.0, 1.0), best)
    assert len(select_proposals(BEST_FIRST, SOME, Liar(), 8)) < 8
