"""The environment of a policy: which tasks it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.training.small_experiment import PLAN, make_environment
from tests.training.world import TASKS

pytestmark = pytest.mark.usefixtures("one_thread")


def test_fewer_tasks_are_spread_over_all():
    limited = make_environment().limit_tasks(replace(PLAN, train_tasks=2, held_out_tasks=0))
    assert [task.id for task in limited.train] == ["t0", "t2"]
    assert limited.held_out_tasks == ()
    assert make_environment().limit_tasks(PLAN).train == TASKS[:4]
