"""Whose threads may be there after a call: the compiler's, while they wait; never a candidate's
own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._inductor.async_compile import AsyncCompile

from torch_cudal1.judge.checks.process import _find_leftovers
from torch_cudal1.judge.worker.memory_handlers import _python_threads


@pytest.fixture
def before() -> list[str]:
    """Threads that earlier tests of this process left."""
    return _python_threads()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        made.submit(int).result()
        yield made


def left(before: list[str]) -> str:
    now = _python_threads()
    for stack in before:
        if stack in now:
            now.remove(stack)
    return _find_leftovers({"python_threads": now}, source=True)


def test_an_idle_pool_of_the_candidate_s_own_is_named(
    before: list[str], pool: ThreadPoolExecutor
) -> None:
    assert left(before).endswith("/concurrent/futures/thread.py")


def test_the_compiler_s_idle_pool_is_not(before: list[str]) -> None:
    AsyncCompile.pool().submit(int).result()
    time.sleep(0.05)  # until its thread waits again
    assert left(before) == ""
    assert any("_inductor/async_compile.py" in stack for stack in _python_threads())


def test_work_in_the_compiler_s_pool_is_named(before: list[str]) -> None:
    started, enough = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        enough.wait(30.0)

    done = AsyncCompile.pool().submit(work)
    try:
        assert started.wait(30.0)
        assert "thread of its own" in left(before)
    finally:
        enough.set()
        done.result()
