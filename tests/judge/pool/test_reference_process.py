"""The reference process of a slot holds the inputs of one reference at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.judge.pool.scripted_slot import ScriptedClock, measure_source
from tests.training.sources import REFERENCE, TASK, program, source
from torch_cudal1.core.errors import TargetError
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.judge.pool.slot import Slot


def test_a_reference_that_cannot_be_used_raises_with_the_tasks_name(slot: Slot) -> None:
    with pytest.raises(TargetError, match="broken task"):
        slot.measure(
            TrainingTask("broken task", "def get_inputs(): return 1"), program("p", source())
        )
    assert measure_source(slot, source(), 1.5).score == 1.5


def test_the_reference_of_a_task_is_loaded_by_its_text(slot: Slot) -> None:
    assert slot.measure(TASK, program("asks for it", source("x * 7"))).measured.outcome == "wrong"
    assert REFERENCE in slot._references.loaded


def test_a_slot_holds_the_inputs_of_one_reference_at_a_time(slot: Slot) -> None:
    other_task = replace(TASK, reference=f"{TASK.reference}\n# another text")
    assert measure_source(slot, source(), 1.5).score == 1.5
    assert slot._references.loaded[TASK.reference].reference_cache
    slot._clock = ScriptedClock(1.5)
    assert slot.measure(other_task, program("p", source())).measured.score == 1.5
    previous, current = (
        slot._references.loaded[TASK.reference],
        slot._references.loaded[other_task.reference],
    )
    assert (bool(previous.reference_cache), previous.baselines, bool(current.reference_cache)) == (
        False,
        None,
        True,
    )
    assert measure_source(slot, source(), 1.5).score == 1.5  # and can come back
