"""Cancelled tasks kill their processes, and those that have not begun do not begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import cancellable, scratch, worker_pool
from torch_cudal1.judge.sandbox.limits import make_limits

CPU = torch.device("cpu")

LIMITS = make_limits(Settings(), CPU)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    telemetry.reset()
    yield
    assert not worker_pool._POOL.idle


def start_child_and_fail() -> None:
    with worker_pool.acquire(LIMITS, Contract()):
        raise RuntimeError("mine")


def test_a_child_that_is_still_starting_is_ended_with_its_scope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker_pool._IDLE_FORK_SERVERS.close_all()
    launched, scratches, add_process = threading.Event(), [], cancellable.TaskScope.add_process

    def note_process(scope: cancellable.TaskScope, process: object) -> None:
        add_process(scope, process)  # type: ignore[arg-type]
        launched.set()

    def note_scratch() -> Path:
        scratches.append(scratch.make_scratch())
        return scratches[-1]

    monkeypatch.setattr(cancellable.TaskScope, "add_process", note_process)
    monkeypatch.setattr("torch_cudal1.judge.sandbox.child.make_scratch", note_scratch)
    monkeypatch.setattr("torch_cudal1.judge.sandbox.fork_server.make_scratch", note_scratch)
    with worker_pool.pool_scope():
        worker_pool.prestart(LIMITS, Contract())
        (starting_child,) = worker_pool._POOL.starting[LIMITS, Contract()]
        assert launched.wait(60)
    with pytest.raises(SandboxError):  # it does not start late either
        starting_child.result(timeout=30)
    assert [path for path in scratches if path.exists()] == []
    assert (
        len(scratches) == 1
    )  # a cancelled start is not tried again, in another way or at a lower level


def test_a_task_that_has_not_begun_does_not_begin_after_its_scope_ended() -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(time.sleep, 0.2)
        with worker_pool.pool_scope():
            task = worker_pool.run_in_background(threads, start_child_and_fail)
        with pytest.raises(SandboxError, match="cancelled"):
            task.result(timeout=30)


class FakeProcess:
    """Notes that it was told to terminate."""

    def __init__(self) -> None:
        self.terminated = False

    def terminate(self) -> None:
        self.terminated = True


class FakeResource:
    """Owns a process, and notes that it was closed."""

    def __init__(self, process: FakeProcess) -> None:
        self.process, self.closed = process, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_a_cancelled_scope_terminates_its_processes_and_those_that_are_added_later() -> None:
    scope, early, late = cancellable.TaskScope(), FakeProcess(), FakeProcess()
    scope.add_process(early)
    assert not early.terminated
    scope.cancel()
    scope.add_process(late)
    assert early.terminated
    assert late.terminated


def test_a_task_knows_its_scope_and_the_thread_forgets_it(threads: ThreadPoolExecutor) -> None:
    scope = cancellable.TaskScope()
    assert scope.submit(threads, cancellable.current_scope).result(30) is scope
    assert threads.submit(cancellable.current_scope).result(30) is None
    assert cancellable.current_scope() is None


def test_a_shared_resource_is_made_once_for_each_key(threads: ThreadPoolExecutor) -> None:
    scope = cancellable.TaskScope()
    first, second, other = (
        scope.submit_once(threads, key, lambda: FakeResource(FakeProcess())).result(30)
        for key in ("a", "a", "b")
    )
    assert first is second
    assert first is not other
    scope.cancel()
    assert first.closed
    assert other.closed


def test_a_released_resource_outlives_its_scope(threads: ThreadPoolExecutor) -> None:
    scope, process = cancellable.TaskScope(), FakeProcess()

    def make_resource() -> FakeResource:
        scope.add_process(process)
        return FakeResource(process)

    resource = scope.submit_once(threads, "key", make_resource).result(30)
    assert scope.release("key") is resource
    assert scope.release("key") is None
    scope.cancel()
    assert not process.terminated
    assert not resource.closed


def test_a_resource_that_could_not_be_made_is_not_released(threads: ThreadPoolExecutor) -> None:
    scope = cancellable.TaskScope()

    def fail() -> FakeResource:
        raise SandboxError("starting", "no process")

    with pytest.raises(SandboxError, match="no process"):
        scope.submit_once(threads, "key", fail).result(30)
    assert scope.release("key") is None
    scope.cancel()
