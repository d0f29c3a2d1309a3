"""Candidates' processes are used again only where the last program left them in order."""

from __future__ import annotations

from typing import Any

import pytest

from tests.judge.pool.scripted_slot import ScriptedClock, trust_own_programs
from tests.training.sources import TASK, program, source
from torch_cudal1.judge.pool.slot import Slot
from torch_cudal1.judge.sandbox.child import CandidateFailure


def test_a_surprise_of_an_own_program_goes_to_one_other_process_again_and_again(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_own_programs(slot, monkeypatch)
    slot._clock = clock = ScriptedClock(9.0, 9.0, 9.0, 9.0)
    for _ in range(2):
        assert slot.measure(TASK, program("p", source())).measured.score == 9.0
    first, other, third, fourth = clock.pids
    assert other != first
    assert (third, fourth) == (first, other)


RIGHT_RESULT = "torch.relu(x) * 2 + 1"


def test_an_own_program_that_fails_in_order_leaves_its_process_to_the_next_and_a_cheat_does_not(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_own_programs(slot, monkeypatch)
    slot._clock = ScriptedClock(1.5, 1.5, 1.5)
    cheat = source(RIGHT_RESULT, before="torch.manual_seed(0)")
    cases = (
        (source("x.no_such_thing()"), "run", True),
        (source("torch.relu(x)"), "wrong", True),
        (cheat, "hack", False),
    )
    for text, outcome, expect_kept in cases:
        assert slot.measure(TASK, program("right", source(RIGHT_RESULT))).measured.outcome == "ok"
        assert slot._processes.kept is not None
        pid = slot._processes.kept.pid
        assert slot.measure(TASK, program("p", text)).measured.outcome == outcome
        kept_process = slot._processes.kept
        assert (kept_process is not None and kept_process.pid == pid) is expect_kept


def test_a_process_that_cannot_free_its_memory_is_ended(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ScriptedProcess:
        def __init__(self, *, fails: bool) -> None:
            self.fails, self.calls, self.closed = fails, list[Any](), False

        def call(self, verb: str, **request: Any) -> dict[str, Any]:
            self.calls.append((verb, request))
            if self.fails:
                raise CandidateFailure(verb, "an illegal memory access was encountered", verb)
            return {}

        def close(self) -> None:
            self.closed = True

    healthy, broken = ScriptedProcess(fails=False), ScriptedProcess(fails=True)
    monkeypatch.setattr(slot._processes, "kept", healthy)
    monkeypatch.setattr(slot._processes, "_second", broken)
    slot._processes.free_gpu_memory()
    assert healthy.calls == broken.calls == [("clear", {})]
    assert (slot._processes.kept, slot._processes._second) == (healthy, None)
    assert (healthy.closed, broken.closed) == (False, True)
