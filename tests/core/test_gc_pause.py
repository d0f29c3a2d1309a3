"""The garbage collector is off while a start imports and traces, and as it was afterwards, whatever
happens meanwhile.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.gc_pause import pause_gc
from torch_cudal1.graph.capture import trace

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    was = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()


def test_it_is_off_inside_and_on_again_after_the_outermost():
    with pause_gc():
        with pause_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with pause_gc():
        pass
    assert not gc.isenabled()


def test_it_is_on_again_after_an_error():
    with pytest.raises(ZeroDivisionError), pause_gc():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_it_stays_off_until_the_last_thread_has_left():
    inside, leave = threading.Event(), threading.Event()

    @pause_gc()
    def other() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        inside.wait()
        with pause_gc():
            pass
        assert not gc.isenabled()
    finally:
        leave.set()
        thread.join()
    assert gc.isenabled()


def is_young(item: object) -> bool:
    return any(item is other for generation in (0, 1) for other in gc.get_objects(generation))


@pytest.mark.parametrize("keeps", [True, False])
def test_what_stays_is_old_at_once_and_what_may_be_garbage_is_not(keeps: bool):
    gc.collect()
    with pause_gc(keeps=keeps):
        created: list[object] = []
    assert is_young(created) is not keeps
    assert gc.get_freeze_count() == 0


def test_what_a_user_has_frozen_stays_so():
    gc.freeze()
    try:
        with pause_gc(keeps=True):
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


FORKS = """
import gc
import os
from torch_cudal1.core.gc_pause import pause_gc

with pause_gc():
    child = os.fork()
    if child == 0:
        os._exit(0 if gc.isenabled() else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gc.isenabled())
print(gc.isenabled())
"""


def test_a_child_forked_meanwhile_collects():
    assert run_script(FORKS) == ["0", "False", "True"]


def run_script(script: str) -> list[str]:
    """The words that a process of its own prints."""
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.split()


class Asks(torch.nn.Module):
    """Notes whether the collector was on while it was traced."""

    is_enabled: bool | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        Asks.is_enabled = gc.isenabled()
        return (x.nonzero() if x.ndim == 1 else x + 1,)


def test_nothing_is_collected_while_a_module_is_traced():
    with torch.no_grad():
        trace(Asks(), [torch.ones(2, 2)])
    assert (Asks.is_enabled, gc.isenabled()) == (False, True)


def test_it_collects_again_after_a_trace_that_failed():
    with pytest.raises(NotLowerableError), torch.no_grad():
        trace(Asks(), [torch.ones(2)])
    assert gc.isenabled()


IMPORTS = """
import gc
import sys

class Asks:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._functorch.aot_autograd":
            print(gc.isenabled())

sys.meta_path.insert(0, Asks())
import torch_cudal1
torch_cudal1.accelerate
print(gc.isenabled())
"""


def test_nothing_is_collected_while_what_a_start_needs_is_imported():
    assert run_script(IMPORTS) == ["False", "True"]
