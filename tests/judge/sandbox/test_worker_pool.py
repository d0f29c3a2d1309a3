"""Children of our own code are lent again, cleared, and only where that is safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.judge.programs import candidate, linear_relu, subject
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox import cancellable, start, worker_pool
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.sandbox.fork_server import ForkedProcess, ForkServer
from torch_cudal1.judge.sandbox.limits import make_limits

CPU = torch.device("cpu")
LIMITS = make_limits(Settings(), CPU)
REGION = linear_relu()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    telemetry.reset()
    yield
    assert not worker_pool._POOL.idle


def trial(child: Child) -> Trial:
    return Trial(subject(REGION), candidate(REGION.program), Contract(), CPU, child)


def test_a_child_is_lent_again_with_nothing_of_the_last_question_in_it() -> None:
    with worker_pool.pool_scope():
        with worker_pool.acquire(LIMITS, Contract()) as first:
            asked = trial(first)
            asked.load("candidate", candidate(REGION.program))
            sample = asked.draw("normal")
            asked.run(sample)
        with worker_pool.acquire(LIMITS, Contract()) as second:
            assert second is first
            with pytest.raises(CandidateFailure, match="KeyError"):
                trial(second).call_slot("candidate", sample.name)
            again = trial(second)
            again.load("candidate", candidate(REGION.program))
            assert again.run(again.draw("normal")).outputs[0] is not None
        with worker_pool.pool_scope(), worker_pool.acquire(LIMITS, Contract()) as third:
            assert third is first
        assert telemetry.report().counters["children_reused"] == 2
        with worker_pool.acquire(LIMITS, Contract("strict")) as other:
            assert other is not first
    with pytest.raises(CandidateFailure, match="given up"):
        first.call("clear")


def fail_with_one() -> None:
    with worker_pool.acquire(LIMITS, Contract()):
        raise RuntimeError("mine")


def test_a_child_that_must_not_be_kept_is_ended() -> None:
    with worker_pool.pool_scope():
        with worker_pool.acquire(LIMITS, Contract()) as spoilt:
            spoilt.usable = False
        with pytest.raises(RuntimeError, match="mine"):
            fail_with_one()
        assert not worker_pool._POOL.idle


def test_strangers_get_a_process_of_their_own() -> None:
    with (
        pytest.raises(ValueError, match="foreign code"),
        worker_pool.acquire(make_limits(Settings(), CPU, trust="foreign"), Contract()),
    ):
        pass


def test_a_child_that_is_still_starting_is_ended_with_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker_pool._IDLE_FORK_SERVERS.close_all()
    launched, scratches, note = threading.Event(), [], cancellable.TaskScope.add_process

    def noted(scope: cancellable.TaskScope, process: object) -> None:
        note(scope, process)  # type: ignore[arg-type]
        launched.set()

    def scratch(prefix: str = "") -> Path:
        scratches.append(start.make_scratch(prefix))
        return scratches[-1]

    monkeypatch.setattr(cancellable.TaskScope, "add_process", noted)
    monkeypatch.setattr("torch_cudal1.judge.sandbox.child.make_scratch", scratch)
    monkeypatch.setattr("torch_cudal1.judge.sandbox.fork_server.make_scratch", scratch)
    with worker_pool.pool_scope():
        worker_pool.prestart(LIMITS, Contract())
        (coming,) = worker_pool._POOL.starting[LIMITS, Contract()]
        assert launched.wait(60)
    with pytest.raises(SandboxError):  # it answers nobody, not even late
        coming.result(timeout=30)
    assert [path for path in scratches if path.exists()] == []
    assert (
        len(scratches) == 1
    )  # what was ended on purpose is not tried again, by another way or at a lower level


def test_work_that_has_not_begun_does_not_begin_when_nobody_waits_any_more() -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(time.sleep, 0.2)
        with worker_pool.pool_scope():
            waiting = worker_pool.in_background(threads, fail_with_one)
        with pytest.raises(SandboxError, match="cancelled"):
            waiting.result(timeout=30)


def test_children_started_in_the_background_are_the_next_ones() -> None:
    with worker_pool.pool_scope():
        worker_pool.prestart(LIMITS, Contract())
        worker_pool.prestart(LIMITS, Contract())
        with worker_pool.acquire(LIMITS, Contract()) as first:
            pass
        with worker_pool.spawn(LIMITS, Contract()) as second:
            assert second is not first
            assert not worker_pool._POOL.starting[LIMITS, Contract()]
        with pytest.raises(CandidateFailure, match="given up"):
            second.call("clear")  # what was to run nothing else runs nothing else
        with worker_pool.acquire(LIMITS, Contract()) as third:
            assert third is first


def forked(child: Child) -> bool:
    return isinstance(child._process, ForkedProcess)


def search_fork_server() -> ForkServer:
    with worker_pool.pool_scope(), worker_pool.acquire(LIMITS, Contract()) as child:
        assert forked(child)
        assert child._fork_server is not None
        return child._fork_server


def is_running(fork_server: ForkServer) -> bool:
    return Path(f"/proc/{fork_server.pid}").exists()


def test_children_are_forked_from_one_process() -> None:
    with worker_pool.pool_scope():
        worker_pool.prestart(LIMITS, Contract())
        with (
            worker_pool.acquire(LIMITS, Contract()) as one,
            worker_pool.spawn(LIMITS, Contract()) as other,
        ):
            assert forked(one)
            assert forked(other)
            asked = trial(other)
            asked.load("candidate", replace(candidate(REGION.program), schedule="inductor"))
            assert asked.run(asked.draw("normal")).outputs[0] is not None
            assert one._fork_server is other._fork_server
    with worker_pool.acquire(LIMITS, Contract()) as alone:
        assert not forked(alone)


def test_the_next_search_takes_the_process_that_the_last_one_has_left() -> None:
    first = search_fork_server()
    assert is_running(first)
    assert search_fork_server() is first


def test_what_nobody_takes_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "_FORK_SERVER_LINGER_S", 0.2)
    left = search_fork_server()
    deadline = time.monotonic() + 10
    while is_running(left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(left)
    assert search_fork_server() is not left


def test_a_search_that_is_interrupted_leaves_no_process() -> None:
    left = []

    def search() -> None:
        with worker_pool.pool_scope(), worker_pool.acquire(LIMITS, Contract()) as child:
            left.append(child._fork_server)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert not is_running(left[0])


def test_another_environment_gets_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = search_fork_server()
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
    assert search_fork_server() is not first
    assert not is_running(first)


def test_folders_added_to_the_import_path_are_there_in_a_forked_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = search_fork_server()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with worker_pool.pool_scope(), worker_pool.acquire(LIMITS, Contract()) as child:
        assert forked(child)
        assert child._fork_server is first
    monkeypatch.setattr(sys, "path", [str(tmp_path / "before"), *sys.path])
    (tmp_path / "before").mkdir()  # what lies in it may hide what was imported
    assert search_fork_server() is not first


def test_a_fork_of_the_process_does_not_talk_to_what_its_parent_left() -> None:
    first = search_fork_server()
    if (pid := os.fork()) == 0:
        os._exit(0 if worker_pool._IDLE_FORK_SERVERS.take(True) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert search_fork_server() is first


def test_the_end_of_the_program_ends_what_a_search_has_left() -> None:
    program = """
from tests.judge.sandbox.test_worker_pool import search_fork_server
if __name__ == '__main__':
    print(search_fork_server().pid)
"""
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert not Path(f"/proc/{int(told.stdout.split()[-1])}").exists()


def test_without_the_process_that_forks_a_child_is_started_from_nothing() -> None:
    with worker_pool.pool_scope():
        with worker_pool.acquire(LIMITS, Contract()) as first:
            assert first._fork_server is not None
            os.kill(first._fork_server.pid, signal.SIGKILL)
            first.usable = False
        with worker_pool.acquire(LIMITS, Contract()) as second:
            assert not forked(second)
            assert (
                second.confinement.level == first.confinement.level
            )  # its end says nothing of the sandbox
    events = [event for event in telemetry.report().events if event.what == "nursery"]
    assert len(events) == 1
    assert "gone" in str(events[0].facts["reason"])


def test_what_reads_a_variable_once_reads_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_pool.pool_scope():
        with worker_pool.acquire(LIMITS, Contract()) as first:
            assert forked(first)
        monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
        with worker_pool.spawn(LIMITS, Contract()) as second:
            assert not forked(second)
