"""The reference's process stays for the next candidate, and each candidate gets one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.judge.evaluate.linear_sources import REFERENCE
from tests.judge.reference.in_process_child import CPU, InProcessChild
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.evaluate import source_processes
from torch_cudal1.judge.evaluate.source_processes import SourceProcesses
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.sandbox.limits import Limits, Trust

OTHER = REFERENCE + "# another\n"


class StartedChild(InProcessChild):
    """A child that knows how far its code is trusted and whether it was closed."""

    def __init__(self, folder: Path, trust: Trust, fork_server: Any) -> None:
        super().__init__(folder)
        self.trust, self.fork_server, self.closed = trust, fork_server, False

    def __enter__(self) -> StartedChild:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed, self.usable = True, False


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[StartedChild]:
    """The children that were started, in order; no process is."""
    children: list[StartedChild] = []

    def start(limits: Limits, contract: Contract, *, fork_server: Any) -> StartedChild:
        # It would work while the calls of its side are timed, and stop for those of the other.
        assert not limits.has_compile_pool
        children.append(StartedChild(tmp_path, limits.trust, fork_server))
        return children[-1]

    monkeypatch.setattr(source_processes, "Child", start)
    return children


def make_processes(trust: Trust = "own", *, ahead: bool = False) -> SourceProcesses:
    return SourceProcesses(Settings(), Contract(), CPU, trust=trust, ahead=ahead)


def open_once(processes: SourceProcesses, text: str = REFERENCE) -> tuple[Any, Any, list[str]]:
    """The child and the reference of one candidate, and the steps that were reported."""
    steps: list[str] = []

    @contextmanager
    def report(name: str) -> Iterator[None]:
        steps.append(name)
        yield

    step: Any = report
    with processes.open(text, step) as (child, reference):
        return child, reference, steps


def find_running(started: list[StartedChild]) -> list[StartedChild]:
    return [child for child in started if not child.closed]


def test_each_candidate_has_a_new_process_and_the_reference_is_read_once(
    started: list[StartedChild],
) -> None:
    processes = make_processes()
    first, reference, steps = open_once(processes)
    second, same_reference, next_steps = open_once(processes)
    assert first is not second
    assert same_reference is reference
    assert (steps, next_steps) == (["start", "reference"], ["start"])
    assert [child.trust for child in find_running(started)] == ["own"]
    processes.close()
    processes.close()
    assert find_running(started) == []


@pytest.mark.parametrize(("trust", "count"), [("own", 1), ("foreign", 2)])
def test_a_foreign_reference_leaves_its_process_to_no_other(
    started: list[StartedChild], trust: Trust, count: int
) -> None:
    processes = make_processes(trust)
    open_once(processes)
    candidates = {id(open_once(processes, OTHER)[0])}
    oracles = [child for child in started if "read_source" in child.verbs]
    assert len(oracles) == count
    assert candidates.isdisjoint(map(id, oracles))
    processes.close()


def test_the_next_process_starts_ahead_and_one_that_died_is_replaced(
    started: list[StartedChild],
) -> None:
    processes = make_processes(ahead=True)
    open_once(processes)
    processes.wait_for_next()
    waiting = started[-1]
    second, *_ = open_once(processes)
    assert second is waiting
    processes.wait_for_next()
    dead = started[-1]
    dead.changes["drop"] = lambda answer: {"error": "it is gone"}
    third, *_ = open_once(processes)
    assert dead.closed
    assert third is not dead
    processes.close()
    assert find_running(started) == []


def test_a_process_that_started_ahead_is_its_takers_and_a_dead_one_nobodys(
    started: list[StartedChild],
) -> None:
    processes = make_processes(ahead=True)
    open_once(processes)
    processes.wait_for_next()
    waiting = started[-1]
    assert processes.take_next() is waiting
    assert processes.take_next() is None
    open_once(processes)
    processes.wait_for_next()
    started[-1].changes["drop"] = lambda answer: {"error": "it is gone"}
    assert processes.take_next() is None
    assert started[-1].closed
    processes.close()
    # Whoever took it closes it.
    assert find_running(started) == [waiting]


def test_a_reference_whose_process_was_lost_is_read_in_a_new_one(
    started: list[StartedChild],
) -> None:
    processes = make_processes()
    _, reference, _ = open_once(processes)
    restarted = processes.restart_reference(REFERENCE)
    assert restarted is not reference
    assert restarted.reference.oracle is not reference.reference.oracle
    assert restarted.reference.key == reference.reference.key
    processes.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("class Model(:", "SyntaxError"),
        (REFERENCE.replace("return torch.relu(self.linear(x)),", "return 7,"), "no tensor"),
        (
            REFERENCE.replace("torch.relu(self.linear(x))", "self.linear(x.relu_())"),
            "writes to argument 0",
        ),
    ],
)
def test_an_unusable_reference_leaves_no_candidate_process(
    started: list[StartedChild], text: str, reason: str
) -> None:
    processes = make_processes()
    with pytest.raises(ReferenceFailure, match=reason):
        open_once(processes, text)
    processes.close()
    assert find_running(started) == []


def test_a_fork_server_forks_them_all(started: list[StartedChild]) -> None:
    server: Any = object()
    processes = SourceProcesses(
        Settings(), Contract(), CPU, trust="own", ahead=False, fork_server=server
    )
    open_once(processes)
    processes.restart_reference(REFERENCE)
    processes.close()
    assert [child.fork_server is server for child in started] == [True] * 3
