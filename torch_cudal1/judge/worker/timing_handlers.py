"""What a child does with what sits in its slots on a clock: the verbs of races and timings.

Times are raw: what they mean, and whether this process may be believed, is for the parent to
decide.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torch_cudal1.device.gpu_state import reset_persisting_l2
from torch_cudal1.judge.benchmark import timing
from torch_cudal1.judge.benchmark.rotating_inputs import Turns
from torch_cudal1.judge.worker.heap import keep_freed

if TYPE_CHECKING:
    from torch_cudal1.judge.worker.session import Session

__all__ = ["VERBS"]

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]


def _warm(session: Session, request: Request) -> Answer:
    """Take two slots to be timed and settle them: first call, cost of a call, the same with a
    flush, in microseconds.
    """
    ring = session.ring(request)
    session.sides = (
        Turns(session.slots[request["a"]], ring),
        Turns(session.slots[request["b"]], ring, 1),
    )
    reset = reset_persisting_l2(session.device)
    with torch.no_grad():
        found = [timing.warm(side, session.device) for side in session.sides]
    first_us = [
        session.first_us.get(request[name], one.first_us)
        for name, one in zip("ab", found, strict=True)
    ]
    return {
        "warm": [
            [first, one.call_us, one.flushed_us] for first, one in zip(first_us, found, strict=True)
        ],
        "reset": reset,
    }


def _time(session: Session, request: Request) -> Answer:
    """A batch of paired samples of the two sides, baseline first; the outputs of the last `keep`
    calls of b are held.

    `position`: where in the ring the call after the last would be.
    """
    session.ring(request)
    a, b = session.warm_sides()
    kept: deque[Any] = deque(maxlen=int(request["keep"]))
    with torch.no_grad():
        pairs = timing.sample_bucket(
            a, b, session.device, timing.Batch.from_json(request["batch"]), kept
        )
    session.held[:] = [list(outputs) for outputs in kept]
    return {"pairs": pairs, "kept": len(session.held), "position": b.position}


def _look(session: Session, request: Request) -> Answer:
    """Host and device time of the two sides apart. With `slot` and `sets`, of a slot that has run
    before, as side b: whether it leaves work on streams that its own events do not wait for.
    """
    with torch.no_grad():
        if "slot" in request:
            run = Turns(session.slots[request["slot"]], session.ring(request))
            return {"b": {"sync_ratio": timing.sync_ratio(run, session.device)}}
        sides = dict(zip("ab", session.warm_sides(), strict=True))
        return {name: asdict(timing.look(side, session.device)) for name, side in sides.items()}


def _spin(session: Session, request: Request) -> Answer:
    """Call a slot `calls` times from place `start` of the ring, and wait: microseconds in all.
    `keep`: outputs are held, and what is freed stays for the next batch. `drop`: what was held
    before is dropped first, outside the clock. `queued`: the GPU's time.
    """
    if request["keep"]:
        keep_freed()
    if request.get("drop"):
        session.held.clear()
    slot, calls, start = request["slot"], int(request["calls"]), int(request["start"])
    elapsed_us, kept = _batch(session, request, slot, calls, start, keep=bool(request["keep"]))
    session.held[:] = [list(outputs) for outputs in kept]
    return {"elapsed_us": elapsed_us}


def _pairs(session: Session, request: Request) -> Answer:
    """Batches of two slots in turn: microseconds of a call, one pair for each of `leads`, which
    says who is first.

    Each begins at a place of the ring of its own and keeps its outputs to its end; those of the
    second slot's last batch are held, from place `start`.
    """
    keep_freed()
    session.held.clear()
    pairs: list[list[float]] = []
    start = 0
    for leads in request["leads"]:
        costs = [0.0, 0.0]
        for side in (int(leads), 1 - int(leads)):
            calls, at = int(request["calls"][side]), secrets.randbelow(1 << 16)
            elapsed_us, kept = _batch(
                session, request, request["slots"][side], calls, at, keep=True
            )
            costs[side] = elapsed_us / calls
            if side:
                session.held[:], start = [list(outputs) for outputs in kept], at
            del kept
        pairs.append(costs)
    return {"pairs": pairs, "start": start}


def _batch(
    session: Session, request: Request, slot: str, calls: int, start: int, *, keep: bool
) -> tuple[float, deque[Any]]:
    """Microseconds of a batch of calls, and what they returned if that is kept."""
    kept: deque[Any] = deque(maxlen=None if keep else 0)
    begin = partial(Turns, session.slots[slot], session.ring(request), start)
    with torch.no_grad():
        if request.get("queued") and session.device.type == "cuda":
            found = timing.queued_us(begin, calls, session.device, kept, session.host_us.get(slot))
            session.host_us[slot] = found.host_us
            return found.spent_us, kept
        return timing.batch_us(begin(), calls, session.device, kept), kept


def _bench(session: Session, request: Request) -> Answer:
    """Interleaved samples of several slots, each of which has run: microseconds per call."""
    runs = {slot: Turns(session.slots[slot], session.ring(request)) for slot in request["slots"]}
    return {
        "samples": timing.interleave(
            runs, session.device, budget_s=float(request["budget_s"]), ran=True
        )
    }


VERBS: dict[str, Callable[[Session, Request], Answer]] = {
    "warm": _warm,
    "time": _time,
    "look": _look,
    "spin": _spin,
    "pairs": _pairs,
    "bench": _bench,
}
