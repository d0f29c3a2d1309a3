"""A source that leaves work, threads, memory or files behind is refused, and so is a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._inductor.async_compile import AsyncCompile

from tests.judge.sources import SourceBench, SourceCase
from torch_cudal1.judge.checks.process import ISOLATION, RESOURCE, _find_leftovers
from torch_cudal1.judge.worker.memory_handlers import _list_python_threads

LATE = """
import threading, time
CALLS = []
def later(out, result):
    time.sleep(0.02)
    with torch.no_grad():
        out.copy_(result)
"""
SOURCES: dict[str, SourceCase] = {
    "filled in later": (
        {
            "top": LATE,
            "before": "out = torch.relu(self.linear(x))\nCALLS.append(1)\n"
            "if len(CALLS) > 3:\n    threading.Thread(target=later, args=(out, out.clone() + 1)).start()",
            "result": "out",
        },
        (RESOURCE,),
        "resource",
        "ms after the call",
    ),
    "a thread each call": (
        {
            "top": "import threading\nSTOP = threading.Event()\n",
            "before": "threading.Thread(target=STOP.wait, daemon=True).start()",
        },
        (RESOURCE,),
        "resource",
        "threads grow",
    ),
    "one thread for ever": (
        {
            "top": "import threading\nSTOP = threading.Event()\nthreading.Thread(target=STOP.wait, daemon=True).start()\n"
        },
        (RESOURCE,),
        "resource",
        "thread of its own",
    ),
    "memory each call": (
        {"top": "KEPT = []\n", "before": "KEPT.append(torch.ones(1 << 18))"},
        (RESOURCE,),
        "resource",
        "bytes grow",
    ),
    "memory that is never touched": (
        {"top": "KEPT = []\n", "before": "KEPT.append(torch.empty(1 << 20))"},
        (RESOURCE,),
        "resource",
        "data bytes grow",
    ),
    "a descriptor each call": (
        {"top": "import os\n", "before": "os.open('/dev/null', os.O_RDONLY)"},
        (RESOURCE,),
        "resource",
        "descriptors grow",
    ),
    "a file each call": (
        {"top": "import tempfile\n", "before": "tempfile.NamedTemporaryFile(delete=False).close()"},
        (RESOURCE,),
        "resource",
        "files grow",
    ),
    "scratch that is freed": (
        {"before": "scratch = torch.ones(1 << 21)"},
        (RESOURCE, ISOLATION),
        None,
        "",
    ),
    "the first parallel call": (
        {"init": "self.__dict__['large'] = torch.ones(1 << 16)", "before": "self.large * 2"},
        (RESOURCE, ISOLATION),
        None,
        "",
    ),
}


@pytest.fixture
def before() -> list[str]:
    """Threads that earlier tests of this process left."""
    return _list_python_threads()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        yield executor


def find_leftovers(before: list[str]) -> str:
    stacks_now = _list_python_threads()
    for stack in before:
        if stack in stacks_now:
            stacks_now.remove(stack)
    return _find_leftovers({"python_threads": stacks_now}, source=True)


def test_an_idle_pool_of_the_candidate_s_own_is_named(
    before: list[str], pool: ThreadPoolExecutor
) -> None:
    assert find_leftovers(before).endswith("/concurrent/futures/thread.py")


def test_the_compiler_s_idle_pool_is_not(before: list[str]) -> None:
    AsyncCompile.pool().submit(int).result()
    time.sleep(0.05)  # until its thread waits again
    assert find_leftovers(before) == ""
    assert any("_inductor/async_compile.py" in stack for stack in _list_python_threads())


def test_work_in_the_compiler_s_pool_is_named(before: list[str]) -> None:
    started, enough = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        enough.wait(30.0)

    work_future = AsyncCompile.pool().submit(work)
    try:
        assert started.wait(30.0)
        assert "thread of its own" in find_leftovers(before)
    finally:
        enough.set()
        work_future.result()


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_uses_more_with_each_call_is_refused_and_its_twin_passes(
    bench: SourceBench, name: str
) -> None:
    bench.assert_verdict(SOURCES[name])
