"""Children of our own code are lent again, cleared, and only where that is safe."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.judge.programs import candidate, linear_relu, subject
from torch_cudal1 import observe
from torch_cudal1.errors import SandboxError
from torch_cudal1.judge import background, start, warm
from torch_cudal1.judge.limits import limits_for
from torch_cudal1.judge.nursery import Forked
from torch_cudal1.judge.sandbox import CandidateFailure, Child
from torch_cudal1.judge.trial import Trial
from torch_cudal1.records import Contract
from torch_cudal1.settings import Settings

CPU = torch.device("cpu")
LIMITS = limits_for(Settings(), CPU)
REGION = linear_relu()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    observe.reset()
    yield
    assert not warm._STORE.idle


def trial(child: Child) -> Trial:
    return Trial(subject(REGION), candidate(REGION.program), Contract(), CPU, child)


def test_a_child_is_lent_again_with_nothing_of_the_last_question_in_it() -> None:
    with warm.kept_warm():
        with warm.lent(LIMITS, Contract()) as first:
            asked = trial(first)
            asked.load("candidate", candidate(REGION.program))
            sample = asked.draw("normal")
            asked.run(sample)
        with warm.lent(LIMITS, Contract()) as second:
            assert second is first
            with pytest.raises(CandidateFailure, match="KeyError"):
                trial(second).call_slot("candidate", sample.name)
            again = trial(second)
            again.load("candidate", candidate(REGION.program))
            assert again.run(again.draw("normal")).outputs[0] is not None
        with warm.kept_warm(), warm.lent(LIMITS, Contract()) as third:
            assert third is first
        assert observe.report().counters["children_reused"] == 2
        with warm.lent(LIMITS, Contract("strict")) as other:
            assert other is not first
    with pytest.raises(CandidateFailure, match="given up"):
        first.call("clear")


def fail_with_one() -> None:
    with warm.lent(LIMITS, Contract()):
        raise RuntimeError("mine")


def test_a_child_that_must_not_be_kept_is_ended() -> None:
    with warm.kept_warm():
        with warm.lent(LIMITS, Contract()) as spoilt:
            spoilt.usable = False
        with pytest.raises(RuntimeError, match="mine"):
            fail_with_one()
        assert not warm._STORE.idle


def test_strangers_get_a_process_of_their_own() -> None:
    with pytest.raises(ValueError, match="strangers"), warm.lent(limits_for(Settings(), CPU, trust="foreign"), Contract()):
        pass


def test_a_child_that_is_still_starting_is_ended_with_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, scratches, note = threading.Event(), [], background.Work.started

    def noted(work: background.Work, process: object) -> None:
        note(work, process)  # type: ignore[arg-type]
        launched.set()

    def scratch(prefix: str = "") -> Path:
        scratches.append(start.make_scratch(prefix))
        return scratches[-1]

    monkeypatch.setattr(background.Work, "started", noted)
    monkeypatch.setattr("torch_cudal1.judge.sandbox.make_scratch", scratch)
    monkeypatch.setattr("torch_cudal1.judge.nursery.make_scratch", scratch)
    with warm.kept_warm():
        warm.begin(LIMITS, Contract())
        (coming,) = warm._STORE.coming[LIMITS, Contract()]
        assert launched.wait(60)
    with pytest.raises(SandboxError):  # it answers nobody, not even late
        coming.result(timeout=30)
    assert [path for path in scratches if path.exists()] == []
    assert len(scratches) == 1  # what was ended on purpose is not tried again, by another way or at a lower level


def test_work_that_has_not_begun_does_not_begin_when_nobody_waits_any_more() -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(time.sleep, 0.2)
        with warm.kept_warm():
            waiting = warm.in_background(threads, fail_with_one)
        with pytest.raises(SandboxError, match="nobody waits"):
            waiting.result(timeout=30)


def test_children_started_in_the_background_are_the_next_ones() -> None:
    with warm.kept_warm():
        warm.begin(LIMITS, Contract())
        warm.begin(LIMITS, Contract())
        with warm.lent(LIMITS, Contract()) as first:
            pass
        with warm.fresh(LIMITS, Contract()) as second:
            assert second is not first
            assert not warm._STORE.coming[LIMITS, Contract()]
        with pytest.raises(CandidateFailure, match="given up"):
            second.call("clear")  # what was to run nothing else runs nothing else
        with warm.lent(LIMITS, Contract()) as third:
            assert third is first


def forked(child: Child) -> bool:
    return isinstance(child._process, Forked)


def test_children_are_forked_from_one_process_which_ends_with_the_body() -> None:
    with warm.kept_warm():
        warm.begin(LIMITS, Contract())
        with warm.lent(LIMITS, Contract()) as one, warm.fresh(LIMITS, Contract()) as other:
            assert forked(one)
            assert forked(other)
            asked = trial(other)
            asked.load("candidate", replace(candidate(REGION.program), schedule="inductor"))
            assert asked.run(asked.draw("normal")).outputs[0] is not None
            assert one._nursery is other._nursery
            nursery = one._nursery
        assert nursery is not None
    assert not Path(f"/proc/{nursery.pid}").exists()
    with warm.lent(LIMITS, Contract()) as alone:
        assert not forked(alone)


def test_without_the_process_that_forks_a_child_is_started_from_nothing() -> None:
    with warm.kept_warm():
        with warm.lent(LIMITS, Contract()) as first:
            assert first._nursery is not None
            os.kill(first._nursery.pid, signal.SIGKILL)
            first.usable = False
        with warm.lent(LIMITS, Contract()) as second:
            assert not forked(second)
            assert second.confinement.level == first.confinement.level  # its end says nothing of the sandbox
    events = [event for event in observe.report().events if event.what == "nursery"]
    assert len(events) == 1
    assert "gone" in str(events[0].facts["reason"])


def test_what_reads_a_variable_once_reads_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with warm.kept_warm():
        with warm.lent(LIMITS, Contract()) as first:
            assert forked(first)
        monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
        with warm.fresh(LIMITS, Contract()) as second:
            assert not forked(second)
