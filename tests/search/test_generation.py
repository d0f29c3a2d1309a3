"""The next generation: legal children that were not measured, where the model hopes for some."""

from __future__ import annotations

from tests.search.kernel_cases import (
    HELD_OUT,
    SIZES,
    family,
    features_of,
    keep_legal,
    product,
    timings,
    took_us,
)
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.templates.gemm_tiles import METHODS
from torch_cudal1.search.cost_model.predictor import CostModel, fit_cost_model
from torch_cudal1.search.evolution.generation import propose_generation

MODEL = fit_cost_model(timings([size for size in SIZES if size != HELD_OUT]), "gemm")


def first_four() -> dict[Proposal, float]:
    subject = features_of(*HELD_OUT)
    return {proposal: took_us(subject, proposal) for proposal in family(*HELD_OUT)[-4:]}


def test_children_are_legal_new_and_within_the_rights_of_their_family() -> None:
    assert isinstance(MODEL, CostModel)
    measured, proposals = first_four(), family(*HELD_OUT)
    children = propose_generation(
        measured, proposals, keep_legal, features_of(*HELD_OUT), MODEL, count=64
    )
    assert children
    assert len(set(children)) == len(children)
    assert not set(children) & set(measured)
    assert any(
        proposal not in proposals
        for proposal in propose_generation(
            measured, proposals[-6:], keep_legal, features_of(*HELD_OUT), MODEL, count=64
        )
    )
    assert not any(
        METHODS[str(proposal.config["method"])].needs_tf32 for proposal in children
    )  # no right was granted, none is gained
    for proposal in children:
        assert lower(product(*HELD_OUT), proposal).kernels


def test_what_was_tried_without_a_time_is_not_tried_again() -> None:
    measured, proposals = first_four(), family(*HELD_OUT)
    before = propose_generation(
        measured, proposals, keep_legal, features_of(*HELD_OUT), MODEL, count=4
    )
    after = propose_generation(
        measured, proposals, keep_legal, features_of(*HELD_OUT), MODEL, count=4, failed=before
    )
    assert before
    assert not set(before) & set(after)


def test_the_next_generation_is_faster_where_the_first_was_badly_chosen() -> None:
    subject, measured = features_of(*HELD_OUT), first_four()
    children = propose_generation(measured, family(*HELD_OUT), keep_legal, subject, MODEL, count=4)
    assert min(took_us(subject, proposal) for proposal in children) < min(measured.values())


def test_where_nothing_faster_is_hoped_for_there_is_no_generation() -> None:
    measured = {proposal: us / 100 for proposal, us in first_four().items()} | {
        family(*HELD_OUT)[0]: 0.001
    }
    assert (
        propose_generation(
            measured, family(*HELD_OUT), keep_legal, features_of(*HELD_OUT), MODEL, count=4
        )
        == ()
    )


def test_without_a_model_there_is_none() -> None:
    assert (
        propose_generation(
            first_four(),
            family(*HELD_OUT),
            keep_legal,
            features_of(*HELD_OUT),
            Refusal("few"),
            count=4,
        )
        == ()
    )


def test_the_same_benchmark_has_the_same_children() -> None:
    generations = [
        propose_generation(
            first_four(), family(*HELD_OUT), keep_legal, features_of(*HELD_OUT), MODEL, count=8
        )
        for _ in range(2)
    ]
    assert generations[0] == generations[1]
