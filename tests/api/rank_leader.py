"""A leading rank that decides for as long as its stdin lets it; `test_rank_line` kills and stops it
meanwhile.

Run as `python -m tests.api.rank_leader PORT HEARTBEAT_S [stuck]`; port 0: it hosts the store
itself; stuck: it lives and never decides. It prints the port, "deciding", and the outcome.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_cudal1.api.ranks import consensus
from torch_cudal1.api.ranks.consensus import Broadcast, NoConsensus
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.context import TuneContext, make_context


def become(rank: int, store: Any) -> None:
    """Let this process be a rank of two, without a process group."""
    consensus._store = lambda: store
    consensus._MEETING_NUMBERS = itertools.count()
    consensus.dist.get_rank = lambda: rank
    consensus.dist.get_world_size = lambda: 2


def place(heartbeat_s: float, cache_dir: Path, deciding_s: float = 600.0) -> TuneContext:
    """Where nothing is looked up."""
    settings = Settings(
        ranks_heartbeat_s=heartbeat_s,
        ranks_timeout_s=120.0,
        ranks_deciding_s=deciding_s,
        cache_dir=cache_dir,
    )
    return make_context(torch.device("cpu"), settings)


def deadlock() -> None:
    """Two threads of a living process that wait for each other's lock."""
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def hold(mine: threading.Lock, other: threading.Lock) -> None:
        with mine:
            both.wait()
            other.acquire()

    threading.Thread(target=hold, args=(second, first), daemon=True).start()
    hold(first, second)


def main(port: int, heartbeat_s: float, how: str = "") -> None:
    hosts = port == 0
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        None,
        is_master=hosts,
        wait_for_workers=False,
        timeout=timedelta(seconds=120),
    )
    print(store.port, flush=True)
    become(0, store)

    def decide() -> tuple[str, Broadcast]:
        print("deciding", flush=True)
        if how == "stuck":
            deadlock()
        sys.stdin.readline()
        return "decided", Broadcast("eager")

    here = place(heartbeat_s, Path("no-such-folder"))
    outcome = consensus.reach_consensus(
        ["graph"], here, decide=decide, follow=lambda decision: "followed"
    )
    print(json.dumps(outcome.reason if isinstance(outcome, NoConsensus) else outcome), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
