"""Supervised fine-tuning: what it teaches, and what it refuses."""

from __future__ import annotations

import pytest

from tests.training.stage_cases import SMALL, writer
from torch_cudal1.training.supervised import SftRow, fine_tune

pytestmark = pytest.mark.usefixtures("one_thread")


def test_fitting_teaches_the_answers_and_nothing_else(start):
    model = writer(start)
    losses = fine_tune(
        model, [SftRow("t0 <go>", "a1 b3"), SftRow("t1 <go>", "a2 b0")], SMALL, seed=0
    )
    assert losses[-1] < 0.1 < losses[0]
    texts = model.sample(["t0 <go>", "t1 <go>"], count=4, temperature=0.3, seed=0)
    assert texts == [["a1 b3"] * 4, ["a2 b0"] * 4], "the end token is learned too"


def test_an_answer_with_an_unknown_word_is_refused_by_name(start):
    with pytest.raises(ValueError, match="'c9'"):
        fine_tune(writer(start), [SftRow("t0 <go>", "a1 c9")], SMALL, seed=0)


def test_nothing_to_learn_from_is_said(start):
    with pytest.raises(ValueError, match="no sample succeeded"):
        fine_tune(writer(start), [], SMALL, seed=0)
