"""RPC handlers of benchmarks: they call slots and measure the time.

Times are raw. The parent decides what they mean, and whether to trust this process.
"""

from __future__ import annotations

import gc
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torch_cudal1.core.errors import Cudal1Error, SandboxError
from torch_cudal1.device.gpu_state import reset_persisting_l2
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.judge.benchmark import timing
from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.benchmark.rotating_inputs import RotatingCalls, RotatingInputs
from torch_cudal1.judge.wire.tensor_bits import all_same_bits
from torch_cudal1.judge.worker.heap import keep_freed
from torch_cudal1.judge.worker.raw_copy import copy_raw_tensors, refuse_lazy
from torch_cudal1.runtime.cuda_graph import capture_calls

if TYPE_CHECKING:
    from torch_cudal1.judge.worker.session import Session

__all__ = ["HANDLERS"]

# Bound before any candidate is imported.
_draw_below = secrets.randbelow
_CHANCE = random.SystemRandom()
_collect, _freeze = gc.collect, gc.freeze
_CHAIN_SETTLE_S = 0.06
# A single wrong result is enough to reject, and nothing is like itself where calls draw numbers.
_MAX_UNLIKE = 3
Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]


def _warm_up(session: Session, request: Request) -> Answer:
    """Warm up slots `a` and `b` for timing. Answers for each: microseconds of the first call, of a
    call, and of a call with an L2 flush.
    """
    ring = session.turn_ring(request)
    session.sides = (
        RotatingCalls(session.slots[request["a"]], ring),
        RotatingCalls(session.slots[request["b"]], ring, 1),
    )
    # A candidate timed before may have set aside part of the L2 cache for itself.
    reset = str(reset_persisting_l2(session.device) or "")
    with torch.no_grad():
        warm_ups = [timing.warm_up(side, session.device) for side in session.sides]
    first_us = [
        # A slot that has run before had its first call then.
        session.first_us.get(request[name], warm_up.first_us)
        for name, warm_up in zip("ab", warm_ups, strict=True)
    ]
    return {
        "warm": [
            [first, warm_up.call_us, warm_up.flushed_us]
            for first, warm_up in zip(first_us, warm_ups, strict=True)
        ],
        "reset": reset,
    }


def _time_pairs(session: Session, request: Request) -> Answer:
    """A batch of paired samples of the two sides, the baseline first. Holds the outputs of the last
    `keep` calls of b.

    `position` in the answer: the place in the ring after the last call.
    """
    session.turn_ring(request)
    a, b = session.warm_sides()
    results: deque[Any] = deque(maxlen=int(request["keep"]))
    with torch.no_grad():
        pairs = timing.sample_bucket(
            a, b, session.device, timing.SampleBatch.from_json(request["batch"]), results
        )
    # Held after the clock has stopped: the parent compares outputs of calls that were timed.
    _keep_results(session, results)
    return {"pairs": pairs, "kept": len(session.held), "position": b.position}


def _keep_results(session: Session, results: deque[Any]) -> None:
    """Hold what timed calls returned. Of one call, drawn here, the bytes are copied at once: what is
    in them now was there when the clock stopped, whoever looks at the others later.
    """
    if results:
        number = _draw_below(len(results))
        session.copied = (number, copy_raw_tensors(results[number]))
    session.held[:] = [list(outputs) for outputs in results]


def _forget_results(session: Session) -> None:
    session.held.clear()
    # A copy without the results that it is one of would be compared with those of another batch.
    session.copied = None


def _find_unlike(session: Session, request: Request) -> Answer:
    """Compare held outputs bit by bit, in random order for at most `limit_s` seconds, with the one
    copied and those of call `judged`, or the first one of the same inputs. Call i of the batch had
    the inputs number ((`start` + i) modulo `ring` + `shift`) modulo `contents`.

    Answers how many were compared, and the numbers of at most `_MAX_UNLIKE` that are like none of
    the two.
    """
    ends = time.monotonic() + float(request["limit_s"])

    def find_inputs(number: int) -> int:
        place = (int(request["start"]) + number) % int(request["ring"])
        return (place + int(request["shift"])) % int(request["contents"])

    judged_call = int(request["judged"])
    if not 0 <= judged_call < len(session.held):
        raise SandboxError(
            "timing",
            f"expected a call of the last batch, 0 to {len(session.held) - 1}; came {judged_call}",
        )
    references = {find_inputs(judged_call): session.held[judged_call]}
    if session.copied is not None:
        references[find_inputs(session.copied[0])] = session.copied[1]
    unlike: list[int] = []
    comparisons = 0
    for number in _CHANCE.sample(range(len(session.held)), len(session.held)):
        if time.monotonic() > ends or len(unlike) == _MAX_UNLIKE:
            break
        outputs, inputs = session.held[number], find_inputs(number)
        refuse_lazy(outputs)
        if inputs not in references or not all_same_bits(references[inputs], outputs):
            unlike.append(number)
        references.setdefault(inputs, outputs)
        comparisons += 1
    return {"compared": comparisons, "unlike": unlike}


def _compare_clocks(session: Session, request: Request) -> Answer:
    """Host time and device time of each of the two sides.

    With `slot` and `sets`, for one slot that has run before: only the ratio of device times with
    and without a wait for the whole device, which shows work left on other streams.
    """
    with torch.no_grad():
        if "slot" in request:
            run = RotatingCalls(session.slots[request["slot"]], session.turn_ring(request))
            return {"b": {"sync_ratio": timing.sync_ratio(run, session.device)}}
        sides = dict(zip("ab", session.warm_sides(), strict=True))
        return {
            name: asdict(timing.measure_side(side, session.device)) for name, side in sides.items()
        }


def _time_batch(session: Session, request: Request) -> Answer:
    """Call a slot `calls` times from place `start` of the ring, and wait. Answers microseconds for
    all calls.

    - keep: hold the outputs, and keep freed memory in the process for the next batch.
    - drop: free the outputs held before.
    - queued: measure the GPU's time.
    """
    if request["keep"]:
        keep_freed()
    # Before the clock starts: freeing takes time too.
    if request.get("drop"):
        _forget_results(session)
    slot, calls, start = request["slot"], int(request["calls"]), int(request["start"])
    elapsed_us, results = _run_batch(
        session, request, slot, calls, start, keep=bool(request["keep"])
    )
    # A batch that keeps nothing, as the first call of another instance, leaves what is held.
    if request["keep"]:
        _keep_results(session, results)
    return {"elapsed_us": elapsed_us}


def _time_unseen(session: Session, request: Request) -> Answer:
    """Time a call of a slot on each entry of the ring: with values that it has had, and with values
    that it has not, in random order. Answers microseconds of both batches, and the calls in each: 0
    where no input can be changed.
    """
    ring = session.turn_ring(request)
    slot, calls, times_us = session.slots[request["slot"]], len(ring.entries), [0.0, 0.0]
    changed, leads = False, secrets.randbelow(2)
    for side in (leads, 1 - leads):
        # The copies of the values that it has had leave the caches as the change does.
        ring.restore()
        if side:
            changed = ring.make_unseen()
        synchronise(session.device)
        run = RotatingCalls(slot, ring, secrets.randbelow(calls))
        with torch.no_grad():
            times_us[side] = timing.batch_us(run, calls, session.device, deque(maxlen=0))
    ring.restore()
    return {
        "familiar_us": times_us[0],
        "unseen_us": times_us[1],
        "calls": calls if changed else 0,
    }


def _time_alternating(session: Session, request: Request) -> Answer:
    """Time batches of two slots in turn. Answers microseconds per call, one pair for each of
    `leads`, whose values say which slot runs first.

    Holds the outputs of the second slot's last batch, whose calls began at place `start` of the
    ring.
    """
    # Page faults of fresh memory would be in the time.
    keep_freed()
    _forget_results(session)
    pairs: list[list[float]] = []
    start = 0
    for leads in request["leads"]:
        costs = [0.0, 0.0]
        for side in (int(leads), 1 - int(leads)):
            # A random place: a slot cannot foresee which inputs come next.
            calls, at = int(request["calls"][side]), secrets.randbelow(1 << 16)
            elapsed_us, results = _run_batch(
                session, request, request["slots"][side], calls, at, keep=True
            )
            costs[side] = elapsed_us / calls
            if side:
                _keep_results(session, results)
                start = at
            # Freed between batches, outside the clock.
            del results
        pairs.append(costs)
    return {"pairs": pairs, "start": start}


def _run_batch(
    session: Session, request: Request, slot: str, calls: int, start: int, *, keep: bool
) -> tuple[float, deque[Any]]:
    """Microseconds of a batch of calls, and the outputs of all of them with `keep`."""
    results: deque[Any] = deque(maxlen=None if keep else 0)
    begin = partial(RotatingCalls, session.slots[slot], session.turn_ring(request), start)
    _hide_objects()
    with torch.no_grad():
        if request.get("queued") and session.device.type == "cuda":
            queued = timing.time_queued_calls(
                begin, calls, session.device, results, session.host_us.get(slot)
            )
            session.host_us[slot] = queued.host_us
            return queued.spent_us, results
        return timing.batch_us(begin(), calls, session.device, results), results


def _hide_objects() -> None:
    """Take what is there now off the lists of `gc`, where a source would find the inputs in rotation
    and the outputs that are kept.
    """
    # Garbage first: what is off the lists is never collected.
    _collect()
    _freeze()


def _time_interleaved(session: Session, request: Request) -> Answer:
    """Interleaved samples of several slots that have run before, in microseconds per call."""
    runs = {
        slot: RotatingCalls(session.slots[slot], session.turn_ring(request))
        for slot in request["slots"]
    }
    return {
        "samples": timing.interleave(
            runs, session.device, budget_s=float(request["budget_s"]), ran=True
        )
    }


def _time_chains(session: Session, request: Request) -> Answer:
    """Interleaved samples of several slots that have run before, in microseconds per call: each slot
    as a CUDA graph that calls it once on every entry of the ring. A call by itself takes as long as
    its launch, where inside a model the next kernel is launched meanwhile.

    Where one cannot be captured, as `_time_interleaved`; `uncaptured` in the answer says why.
    """
    ring = session.turn_ring(request)
    chains: dict[str, Callable[[], object]] = {}
    synchronise(session.device)
    try:
        for slot in request["slots"]:
            chains[slot] = _capture_chain(session.slots[slot], ring, session.device)
    # An operator may not be captured: single calls say something, too. The answer says which it is.
    except (RuntimeError, Cudal1Error) as error:
        chains.clear()
        synchronise(session.device)
        return {**_time_interleaved(session, request), "uncaptured": str(error)[:200]}
    samples = timing.interleave(
        chains,
        session.device,
        budget_s=float(request["budget_s"]),
        # The clocks settle once for all of them.
        settle_s=_CHAIN_SETTLE_S,
        ran=True,
    )
    calls = len(ring.entries)
    return {"samples": {slot: [us / calls for us in chain] for slot, chain in samples.items()}}


def _capture_chain(
    runner: Runner, ring: RotatingInputs, device: torch.device
) -> Callable[[], object]:
    def call_on_each() -> None:
        for entry in ring.entries:
            runner(entry)

    return capture_calls(call_on_each, device)


HANDLERS: dict[str, Callable[[Session, Request], Answer]] = {
    "warm": _warm_up,
    "time": _time_pairs,
    "unlike": _find_unlike,
    "look": _compare_clocks,
    "spin": _time_batch,
    "pairs": _time_alternating,
    "unseen": _time_unseen,
    "bench": _time_interleaved,
    "chains": _time_chains,
}
