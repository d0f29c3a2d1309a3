"""The next generation: legal children that were not measured, where the model hopes for some."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.search.kernel_cases import SIZES, family, features_of, product, timings, took_us
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.templates.gemm_tiles import METHODS
from torch_cudal1.search.cost_model.predictor import CostModel, fit_cost_model
from torch_cudal1.search.evolution.buckets import draw_contrasting
from torch_cudal1.search.evolution.generation import propose_generation
from torch_cudal1.search.evolution.mutators import filter_legal, make_child

HELD_OUT = (4096, 2048, 4096)
MODEL = fit_cost_model(timings([one for one in SIZES if one != HELD_OUT]), "gemm")


def allowed(some: Sequence[Proposal]) -> tuple[Proposal, ...]:
    return filter_legal(product(*HELD_OUT), some, 90)


def first_four() -> dict[Proposal, float]:
    subject = features_of(*HELD_OUT)
    return {one: took_us(subject, one) for one in family(*HELD_OUT)[-4:]}


def test_children_are_legal_new_and_within_the_rights_of_their_family() -> None:
    assert isinstance(MODEL, CostModel)
    measured, own = first_four(), family(*HELD_OUT)
    children = propose_generation(measured, own, allowed, features_of(*HELD_OUT), MODEL, count=64)
    assert children
    assert len(set(children)) == len(children)
    assert not set(children) & set(measured)
    assert any(
        one not in own
        for one in propose_generation(
            measured, own[-6:], allowed, features_of(*HELD_OUT), MODEL, count=64
        )
    )
    assert not any(
        METHODS[str(one.config["method"])].needs_tf32 for one in children
    )  # no right was granted, none is gained
    for one in children:
        assert lower(product(*HELD_OUT), one).kernels


def test_what_was_tried_without_a_time_is_not_tried_again() -> None:
    measured, own = first_four(), family(*HELD_OUT)
    before = propose_generation(measured, own, allowed, features_of(*HELD_OUT), MODEL, count=4)
    after = propose_generation(
        measured, own, allowed, features_of(*HELD_OUT), MODEL, count=4, failed=before
    )
    assert before
    assert not set(before) & set(after)


def test_the_next_generation_is_faster_where_the_first_was_badly_chosen() -> None:
    subject, measured = features_of(*HELD_OUT), first_four()
    children = propose_generation(measured, family(*HELD_OUT), allowed, subject, MODEL, count=4)
    assert min(took_us(subject, one) for one in children) < min(measured.values())


def test_where_nothing_faster_is_hoped_for_there_is_no_generation() -> None:
    measured = {one: us / 100 for one, us in first_four().items()} | {family(*HELD_OUT)[0]: 0.001}
    assert (
        propose_generation(
            measured, family(*HELD_OUT), allowed, features_of(*HELD_OUT), MODEL, count=4
        )
        == ()
    )


def test_without_a_model_there_is_none() -> None:
    assert (
        propose_generation(
            first_four(),
            family(*HELD_OUT),
            allowed,
            features_of(*HELD_OUT),
            Refusal("few"),
            count=4,
        )
        == ()
    )


def test_the_same_race_has_the_same_children() -> None:
    made = [
        propose_generation(
            first_four(), family(*HELD_OUT), allowed, features_of(*HELD_OUT), MODEL, count=8
        )
        for _ in range(2)
    ]
    assert made[0] == made[1]


def test_what_needs_more_than_the_device_has_is_not_legal() -> None:
    config: dict[str, int | str | bool] = {
        "method": "bf16x6",
        "rows": 128,
        "columns": 128,
        "depth": 32,
        "warps": 8,
        "stages": 3,
        "group": 8,
        "split": 1,
    }
    config |= {"promote": 1, "cluster": 1}
    changes: tuple[dict[str, int | str | bool], ...] = (
        {},
        {"stages": 16},
        {"columns": 256, "warps": 4},
        {"rows": 96},
    )
    fits, deep, wide, odd = (Proposal("gemm", config | change) for change in changes)
    assert allowed([fits, deep, wide, odd, Proposal("conv", config)]) == (fits,)


def test_a_child_has_its_fields_from_its_parents_or_a_step_beside() -> None:
    own = family(*HELD_OUT)
    parents = [
        next(one for one in own if one.config["method"] == name) for name in ("bf16x6", "tf32x3")
    ]
    known = {name: {one.config[name] for one in own} for name in own[0].config}
    for seed in range(200):
        child = make_child(parents, own, random.Random(seed))
        moved = [
            name
            for name, value in child.config.items()
            if value not in {one.config[name] for one in parents}
        ]
        assert len(moved) <= 1
        for name in moved:
            value = child.config[name]
            own_numbers = [one.number(name, 0) for one in parents if isinstance(value, int)]
            assert value in known[name] or value in {n * 2 for n in own_numbers} | {
                n // 2 for n in own_numbers
            }


def test_parents_come_from_distinct_buckets_and_the_fast_ones_more_often() -> None:
    scores = [1.0, 1.001, 4.0, 4.004, 16.0]
    draws = [draw_contrasting(scores, random.Random(seed)) for seed in range(300)]
    assert all(len(one) == 2 for one in draws)
    assert not any(set(one) in ({0, 1}, {2, 3}) for one in draws)
    assert sum(4 in one for one in draws) > sum(0 in one or 1 in one for one in draws)
    assert draw_contrasting([2.0, 2.0, 2.0], random.Random(0)) in ([0], [1], [2])
