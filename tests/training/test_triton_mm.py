"""Triton programs of matrix products: tiles with an epilogue, and sums over K in shares."""

from __future__ import annotations

import pytest

from tests.training.triton_facts import Facts, check_facts, compute_facts, list_ops, needs_gpu

NAMES = list_ops("mm")


@pytest.fixture(scope="module")
def facts() -> Facts:
    return compute_facts(NAMES, interpreted=True)


@pytest.mark.parametrize("name", NAMES)
def test_programs_compute_what_they_are_meant_to_under_the_interpreter(
    facts: Facts, name: str
) -> None:
    check_facts(name, facts[name])


@pytest.mark.gpu
@needs_gpu
def test_programs_compute_what_they_are_meant_to_on_a_gpu() -> None:
    for name, facts in compute_facts(NAMES, interpreted=False).items():
        check_facts(name, facts)
