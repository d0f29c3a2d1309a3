"""Nobody waits for a deciding rank that was killed or stopped, everybody for one that is slow and
lives, within a bound.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.api.rank_leader import place
from torch_cudal1.api.ranks import consensus
from torch_cudal1.api.ranks.consensus import NoConsensus
from torch_cudal1.api.ranks.store_channel import StoreChannel

ROOT = Path(__file__).parents[2]
# below the ten minutes that a decision may take, far above what a busy machine adds to two seconds
LONG_S = 300.0


class Leader:
    """The process that leads; `store` is this process's way to the other."""

    def __init__(self, hosts: bool, heartbeat_s: float, *how: str) -> None:
        self.heartbeat_s = heartbeat_s
        own_store = (
            None
            if hosts
            else dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        )
        command = [
            sys.executable,
            "-m",
            "tests.api.rank_leader",
            "0" if own_store is None else str(own_store.port),
            str(heartbeat_s),
            *how,
        ]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("TORCH_CUDAL1_")
        }
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        port = int(self.line())
        timeout = timedelta(seconds=120)
        self.store = own_store or dist.TCPStore(
            "127.0.0.1", port, None, is_master=False, timeout=timeout
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def once_deciding(self, act: Callable[[], object]) -> threading.Thread:
        def watch() -> None:
            assert self.line() == "deciding"
            act()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`follower(leader)` is what rank 1, this process, comes to."""
    monkeypatch.setattr(consensus, "_MEETING_NUMBERS", itertools.count())
    monkeypatch.setattr(consensus.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(consensus.dist, "get_world_size", lambda: 2)

    def agree(leader: Leader, deciding_s: float = 600.0) -> Any:
        monkeypatch.setattr(consensus, "_store", lambda: leader.store)
        here = place(leader.heartbeat_s, tmp_path, deciding_s)
        return consensus.reach_consensus(
            ["graph"],
            here,
            decide=lambda: pytest.fail("it does not lead"),
            follow=lambda decision: decision,
        )

    yield agree
    consensus._store_was_silent = consensus._last_meeting_timed_out = False


@pytest.fixture
def leader(request: pytest.FixtureRequest) -> Iterator[Leader]:
    process = Leader(*request.param)
    yield process
    process.process.kill()
    process.process.wait()


def leading(*how: str, hosts: bool, heartbeat_s: float = 2.0) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("leader", [(hosts, heartbeat_s, *how)], indirect=True)


@leading(hosts=False)
def test_a_leader_that_is_killed_is_not_waited_for(
    leader: Leader, follower: Callable[..., Any]
) -> None:
    leader.once_deciding(leader.process.kill)
    began = time.monotonic()
    outcome = follower(leader)
    assert isinstance(outcome, NoConsensus)
    assert (
        "rank 0 gave no sign of life for 2 s while the others waited for its decision"
        in outcome.reason
    )
    assert time.monotonic() - began < LONG_S


@leading(hosts=False)
def test_a_leader_that_is_stopped_is_not_waited_for_and_takes_the_baseline_too_when_it_goes_on(
    leader: Leader, follower: Callable[..., Any]
) -> None:
    leader.once_deciding(lambda: leader.process.send_signal(signal.SIGSTOP))
    began = time.monotonic()
    outcome = follower(leader)
    assert isinstance(outcome, NoConsensus)
    assert "no sign of life" in outcome.reason
    assert time.monotonic() - began < LONG_S
    leader.process.send_signal(signal.SIGCONT)
    leader.go_on()
    assert json.loads(leader.line()) == outcome.reason


@leading(hosts=False, heartbeat_s=12.0)
def test_a_leader_that_is_slow_and_lives_is_waited_for(
    leader: Leader, follower: Callable[..., Any]
) -> None:
    """It decides for as long as it takes to beat more often than fits into the twelve seconds of
    patience.
    """

    def slowly() -> None:
        while (
            int(leader.store.get("torch_cudal1/0/beat/0")) < 10
        ):  # one comes every one and a half seconds
            time.sleep(0.05)
        leader.go_on()

    leader.once_deciding(slowly)
    assert not isinstance(follower(leader), NoConsensus)
    assert json.loads(leader.line()) == "decided"


@leading("stuck", hosts=False, heartbeat_s=30.0)
def test_a_leader_that_lives_and_is_stuck_is_given_up_and_hardly_waited_for_again(
    leader: Leader, follower: Callable[..., Any]
) -> None:
    began = time.monotonic()
    outcome = follower(leader, 6.0)
    assert isinstance(outcome, NoConsensus)
    assert (
        "rank 0 decided nothing within 6 s while the others waited for its decision"
        in outcome.reason
    )
    while (
        int(leader.store.get("torch_cudal1/0/beat/0")) < 2
    ):  # it is alive all the time, so another one comes
        time.sleep(0.05)
    assert leader.process.poll() is None
    outcome = follower(leader, 6.0)
    assert isinstance(outcome, NoConsensus)
    assert "only ranks [1] of 2 came within 1 s" in outcome.reason
    assert time.monotonic() - began < LONG_S


@leading(hosts=True)
def test_a_leader_that_takes_the_store_with_it_is_not_waited_for(
    leader: Leader, follower: Callable[..., Any]
) -> None:
    leader.once_deciding(leader.process.kill)
    began = time.monotonic()
    outcome = follower(leader)
    assert isinstance(outcome, NoConsensus)
    assert "the store of the process group failed" in outcome.reason
    assert time.monotonic() - began < LONG_S


@leading(hosts=True)
def test_a_stopped_leader_whose_store_answers_nothing_is_not_waited_for(
    leader: Leader, follower: Callable[..., Any]
) -> None:
    leader.once_deciding(lambda: leader.process.send_signal(signal.SIGSTOP))
    began = time.monotonic()
    outcome = follower(leader)
    assert isinstance(outcome, NoConsensus)
    assert "the store of the process group failed: no answer within 2 s" in outcome.reason
    assert time.monotonic() - began < LONG_S
    assert isinstance(follower(leader), NoConsensus)  # and the next time for a second at the most
    assert consensus._store_was_silent


def test_a_beat_that_goes_on_for_ever_is_not_waited_for_for_ever() -> None:
    store = dist.HashStore()
    line = StoreChannel(store, "base", 10.0)
    with line.send_heartbeats("beat", 0.4):
        assert (
            line.wait_while_alive("told", "closed", "beat", (10.0, 0.5))
            == "decided nothing within 0.5 s"
        )
    store.set("base/told", "yes")
    assert line.wait_while_alive("told", "closed", "beat", (10.0, 0.5)) == ""
