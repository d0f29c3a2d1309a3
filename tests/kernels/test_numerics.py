"""Every emitted kernel, run under Triton's interpreter, gives what float64 gives; NaN and infinity
land where eager has them.

One subprocess computes the chosen cases (the interpreter is chosen when Triton is imported); the tests
below read its facts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kernels.cases import all_cases
from tests.once import chosen_names, run_interpreted

NAMES = sorted(all_cases())
FAR_FROM_ZERO, SPLIT = "layer_norm far from zero", "sum of everything, split"
LIMIT = {
    "fp32": 16.0,
    "half": 2.5,
}  # roundings of the output dtype; eager's own error is the other measure
ROOT = Path(__file__).parents[2]
Facts = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    names = [*chosen_names(request), FAR_FROM_ZERO, SPLIT]
    return run_interpreted("tests.kernels.compare", names, tmp_path_factory)


@pytest.mark.parametrize("name", NAMES)
def test_every_proposal_matches_float64(facts: Facts, name: str) -> None:
    proposal_facts = facts[name]
    assert proposal_facts, "no proposal covers this fusion group"
    for fact in proposal_facts:
        limit = max(LIMIT["half" if "16" in fact["dtype"] else "fp32"], 2.0 * fact["eager"])
        assert fact["spec"], f"dtype, shape or strides differ: {fact}"
        assert fact["special"], f"NaN or infinity misplaced: {fact}"
        assert fact["error"] <= limit, f"error over {limit}: {fact}"


def test_the_corrected_two_pass_variance_beats_plain_two_pass_far_from_zero(facts: Facts) -> None:
    """At mean 1000 the rounded mean alone costs thousands of roundings; after its correction a
    handful remain.
    """
    assert all(fact["error"] < 16 for fact in facts[FAR_FROM_ZERO])


def test_a_split_fusion_group_has_split_and_unsplit_proposals(facts: Facts) -> None:
    splits = {fact["config"]["split"] for fact in facts[SPLIT]}
    assert 1 in splits
    assert max(splits) > 1
