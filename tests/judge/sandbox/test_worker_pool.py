"""Children for own code are used again, cleared, and only where that is safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.judge.programs import candidate, linear_relu, subject
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox import worker_pool
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


def make_trial(child: Child) -> Trial:
    return Trial(subject(REGION), candidate(REGION.program), Contract(), CPU, child)


def test_a_child_is_used_again_with_nothing_of_its_last_trial_in_it() -> None:
    with worker_pool.pool_scope():
        with worker_pool.acquire(LIMITS, Contract()) as first:
            trial = make_trial(first)
            trial.load("candidate", candidate(REGION.program))
            sample = trial.draw("normal")
            trial.run(sample)
        with worker_pool.acquire(LIMITS, Contract()) as second:
            assert second is first
            with pytest.raises(CandidateFailure, match="KeyError"):
                make_trial(second).call_slot("candidate", sample.name)
            second_trial = make_trial(second)
            second_trial.load("candidate", candidate(REGION.program))
            assert second_trial.run(second_trial.draw("normal")).outputs[0] is not None
        with worker_pool.pool_scope(), worker_pool.acquire(LIMITS, Contract()) as third:
            assert third is first
        assert telemetry.report().counters["children_reused"] == 2
        with worker_pool.acquire(LIMITS, Contract("strict")) as strict_child:
            assert strict_child is not first
    with pytest.raises(CandidateFailure, match="given up"):
        first.call("clear")


def use_child_and_fail() -> None:
    with worker_pool.acquire(LIMITS, Contract()):
        raise RuntimeError("mine")


def test_a_child_that_must_not_be_used_again_is_ended() -> None:
    with worker_pool.pool_scope():
        with worker_pool.acquire(LIMITS, Contract()) as unusable:
            unusable.usable = False
        with pytest.raises(RuntimeError, match="mine"):
            use_child_and_fail()
        assert not worker_pool._POOL.idle


def test_foreign_code_gets_no_child_of_the_pool() -> None:
    with (
        pytest.raises(ValueError, match="foreign code"),
        worker_pool.acquire(make_limits(Settings(), CPU, trust="foreign"), Contract()),
    ):
        pass


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


def is_forked(child: Child) -> bool:
    return isinstance(child._process, ForkedProcess)


def search_fork_server() -> ForkServer:
    with worker_pool.pool_scope(), worker_pool.acquire(LIMITS, Contract()) as child:
        assert is_forked(child)
        assert child._fork_server is not None
        return child._fork_server


def is_running(fork_server: ForkServer) -> bool:
    return Path(f"/proc/{fork_server.pid}").exists()


def test_children_are_forked_from_one_process() -> None:
    with worker_pool.pool_scope():
        worker_pool.prestart(LIMITS, Contract())
        with (
            worker_pool.acquire(LIMITS, Contract()) as first,
            worker_pool.spawn(LIMITS, Contract()) as second,
        ):
            assert is_forked(first)
            assert is_forked(second)
            trial = make_trial(second)
            trial.load("candidate", replace(candidate(REGION.program), schedule="inductor"))
            assert trial.run(trial.draw("normal")).outputs[0] is not None
            assert first._fork_server is second._fork_server
    with worker_pool.acquire(LIMITS, Contract()) as unpooled:
        assert not is_forked(unpooled)


def test_the_next_search_takes_the_fork_server_of_the_last_one() -> None:
    first = search_fork_server()
    assert is_running(first)
    assert search_fork_server() is first


def test_a_fork_server_that_no_search_takes_ends_when_its_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_pool, "_FORK_SERVER_LINGER_S", 0.2)
    idle_server = search_fork_server()
    deadline = time.monotonic() + 10
    while is_running(idle_server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(idle_server)
    assert search_fork_server() is not idle_server


def test_a_search_that_is_interrupted_leaves_no_process() -> None:
    servers = []

    def search() -> None:
        with worker_pool.pool_scope(), worker_pool.acquire(LIMITS, Contract()) as child:
            servers.append(child._fork_server)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search()
    assert not is_running(servers[0])


def test_another_environment_gets_another_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert is_forked(child)
        assert child._fork_server is first
    monkeypatch.setattr(sys, "path", [str(tmp_path / "before"), *sys.path])
    (tmp_path / "before").mkdir()  # what lies in it may hide what was imported
    assert search_fork_server() is not first


def test_a_fork_of_this_process_does_not_use_the_fork_server_of_its_parent() -> None:
    first = search_fork_server()
    if (pid := os.fork()) == 0:
        os._exit(0 if worker_pool._IDLE_FORK_SERVERS.take(True) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert search_fork_server() is first


def test_the_end_of_the_program_ends_the_fork_server_of_a_search() -> None:
    program = """
from tests.judge.sandbox.test_worker_pool import search_fork_server
if __name__ == '__main__':
    print(search_fork_server().pid)
"""
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert not Path(f"/proc/{int(completed.stdout.split()[-1])}").exists()


def test_without_its_fork_server_a_child_is_started_from_nothing() -> None:
    with worker_pool.pool_scope():
        with worker_pool.acquire(LIMITS, Contract()) as first:
            assert first._fork_server is not None
            os.kill(first._fork_server.pid, signal.SIGKILL)
            first.usable = False
        with worker_pool.acquire(LIMITS, Contract()) as second:
            assert not is_forked(second)
            assert (
                second.confinement.level == first.confinement.level
            )  # its end says nothing of the sandbox
    events = [event for event in telemetry.report().events if event.what == "nursery"]
    assert len(events) == 1
    assert "gone" in str(events[0].facts["reason"])


def test_a_child_after_a_change_of_the_environment_is_not_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with worker_pool.pool_scope():
        with worker_pool.acquire(LIMITS, Contract()) as first:
            assert is_forked(first)
        monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
        with worker_pool.spawn(LIMITS, Contract()) as second:
            assert not is_forked(second)
