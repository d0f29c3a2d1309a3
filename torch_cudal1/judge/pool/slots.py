"""`SlotPool`: slots side by side, each in its own process, and the assignment of programs to them.

A slot holds the inputs and float64 results of one reference at a time; making them takes as long as
evaluating a program or two. So a slot stays with a reference while programs for it wait, and then
goes to the reference with the most waiting programs per slot. When the process of a slot ends, its
program is measured once more. A slot that finds no GPU memory, or no process, is given up while
there are others.

Slots for own programs share the GPU through an MPS server (`mps`), where a fault of one program
ends the work of all. So each slot tests its CUDA context after a program, and no result rests on
another program's fault. After a fault all slots are ended, and their programs are measured again in
a separate slot with a context of its own. After three faults the slots work without the server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, TypeAlias

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import Cudal1Error, SandboxError
from torch_cudal1.core.settings import set_environment
from torch_cudal1.judge.pool import mps
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.slot import Iteration, OutOfDeviceMemory, Slot

__all__ = ["MeasurementRequest", "SlotPool", "count_fitting_slots"]

# Task, program, the best score of the task so far, whether the program was validated before.
MeasurementRequest: TypeAlias = tuple[TrainingTask, Decoded, float | None, bool]
# GPU memory of one slot: five CUDA contexts (the slot's, the reference's, the program's, the next
# program's, that for surprises) of 0.6 GiB with cuBLAS, three arenas of 128 MiB, twice the results
# of one batch (1 GiB at most). With tensors of 32 MiB six slots took 50 GiB of an H100.
_LANE_BYTES = 5 << 30
# Tensors of the largest size per slot: 20 input sets with the results of eager and float64 here,
# copies and a ring in the child.
_SETS = 120
# Of the free memory.
_SHARE = 0.9
# Of one slot, see above.
_CONTEXTS = 5
# After this number, starting again costs more than a server gains.
_MOST_FAULTS = 3
# Until a fault that ended a program has reached the context of its slot.
_SPREAD_S = 0.05
# Programs waiting per slot at a reference. With fewer, the present slot is done as soon as a second
# one would be.
_WORTH_MOVING = 2


def count_fitting_slots(wanted: int, device: torch.device, tensor_bytes: int) -> int:
    """How many slots, at most `wanted`, fit into the free memory of a GPU; at least 1.

    `tensor_bytes`: size of the largest tensor.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return wanted
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(wanted, int(_SHARE * free) // (_LANE_BYTES + _SETS * tensor_bytes)))


@dataclass
class _Seat:
    """One slot's process. `reference`: source of its last reference. `question`, `answer`: the
    request that it works on, and the future of its result.
    """

    pool: ProcessPoolExecutor | None = None
    reference: str = ""
    question: MeasurementRequest | None = None
    answer: Future[Iteration] | None = None


class SharedContextFault(Cudal1Error, RuntimeError):
    """The GPU context that all slots share is lost, through the program of any of them."""


class SlotPool:
    """`count` slots, or as many as an MPS server has room for. Use it from one thread; `close` ends
    their processes.

    `server`: the MPS server, or None. `faults`: how many programs have ended the work of all slots.
    """

    def __init__(self, terms: MeasurementSettings, count: int) -> None:
        self._terms = terms
        self.faults = 0
        self.server = self._begin_server(count)
        self._seats = [
            _Seat()
            # The server refuses contexts beyond its limit.
            for _ in range(min(count, mps.MOST_CLIENTS // _CONTEXTS) if self.server else count)
        ]
        # Has no server: its context is its own.
        self._apart = _Seat()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        for seat in (*self._seats, self._apart):
            _vacate(seat)
        if self.server is not None:
            self.server.close()

    @property
    def served(self) -> int:
        """How many slots share the GPU through a server."""
        return len(self._seats) if self.server is not None else 0

    def _begin_server(self, count: int) -> mps.Mps | None:
        terms = self._terms
        worth = terms.mps and count > 1 and terms.trust == "own" and terms.device.type == "cuda"
        return mps.start(terms.device) if worth else None

    def answers(self, questions: Sequence[MeasurementRequest]) -> Iterator[Iteration | Cudal1Error]:
        """One answer for each request, in the order of completion. A program that ends the
        processes of two slots has failed.
        """
        waiting: dict[str, deque[MeasurementRequest]] = {}
        again: set[tuple[str, str]] = set()
        apart: deque[MeasurementRequest] = deque()
        for question in questions:
            waiting.setdefault(question[0].reference, deque()).append(question)
        while True:
            for seat in self._seats:
                if seat.question is None and (reference := self._next(seat, waiting)):
                    self._give(seat, waiting[reference].popleft())
            if apart and self._apart.question is None:
                self._give(self._apart, apart.popleft())
            busy = {
                seat.answer: seat for seat in (*self._seats, self._apart) if seat.answer is not None
            }
            if not busy:
                return
            for done in wait(busy, return_when=FIRST_COMPLETED).done:
                seat = busy[done]
                # Ended meanwhile, with all others, after a fault.
                if seat.answer is None:
                    continue
                question, answer = _taken(seat)
                name = (question[0].id, question[1].program)
                if isinstance(answer, SharedContextFault):
                    # Any of these programs may have caused the fault: each runs alone now.
                    apart.extend((question, *self._begin_anew()))
                elif name not in again and self._lost(seat, answer):
                    # Once: the process may have ended through another cause than this program.
                    again.add(name)
                    (apart if seat is self._apart else waiting[question[0].reference]).append(
                        question
                    )
                else:
                    yield answer or _twice_lost(question)

    def _begin_anew(self) -> list[MeasurementRequest]:
        """After a fault: end all slots but the separate one, and start another server. Returns the
        requests that they worked on.
        """
        self.faults += 1
        telemetry.record("judge", "mps", "fault", faults=self.faults)
        asked = [seat.question for seat in self._seats if seat.question is not None]
        for seat in self._seats:
            _vacate(seat)
        if self.server is not None:
            self.server.close()
            self.server = (
                self._begin_server(len(self._seats)) if self.faults < _MOST_FAULTS else None
            )
        return asked

    def _lost(self, seat: _Seat, answer: Iteration | Cudal1Error | None) -> bool:
        """Whether the slot failed, and not the program: its process ended, or found no memory or no
        process.
        """
        if answer is None:
            telemetry.record("judge", "lane_lost", "training")
            return True
        if (
            not isinstance(answer, SandboxError | OutOfDeviceMemory)
            or len(self._seats) == 1
            or seat is self._apart
        ):
            return False
        telemetry.record(
            "judge", "lane_retired", "training", reason=str(answer), left=len(self._seats) - 1
        )
        _vacate(seat)
        # Given up, so that the others have more memory and processes; the last one stays.
        self._seats.remove(seat)
        return True

    def _next(self, seat: _Seat, waiting: dict[str, deque[MeasurementRequest]]) -> str:
        """The reference for whose programs a free slot works next; "" for none."""
        if waiting.get(seat.reference):
            return seat.reference
        there = [other.reference for other in self._seats if other.question is not None]
        # A new slot takes any reference, as it must start sooner or later.
        enough = 0 if seat.pool is None else _WORTH_MOVING
        worth = {
            reference: len(left) / (1 + there.count(reference))
            for reference, left in waiting.items()
            if left and len(left) >= enough * there.count(reference)
        }
        return max(worth, key=lambda reference: worth[reference], default="")

    def _give(self, seat: _Seat, question: MeasurementRequest) -> None:
        """Submit a request to a slot; in a new process where its process ended while idle."""
        seat.question, seat.reference = question, question[0].reference
        # A pool reports the end of its idle process only when a request is submitted.
        for _ in range(2):
            if seat.pool is None:
                # Slots import torch once for all, and inherit no CUDA context.
                context = get_context("forkserver")
                context.set_forkserver_preload([__name__])
                served = (
                    self.server.variables
                    if self.server is not None and seat is not self._apart
                    else {}
                )
                seat.pool = ProcessPoolExecutor(
                    1, context, _open_lane, (self._terms, torch.get_num_threads(), served)
                )
            try:
                seat.answer = seat.pool.submit(_in_lane, question)
                return
            except BrokenProcessPool:
                _vacate(seat)
        raise BrokenProcessPool("a new measuring process broke before it was used")


def _taken(seat: _Seat) -> tuple[MeasurementRequest, Iteration | Cudal1Error | None]:
    """Take the finished request of a slot and its answer, None if its process ended."""
    assert seat.question is not None
    assert seat.answer is not None
    question, answer = seat.question, seat.answer
    seat.question = seat.answer = None
    try:
        return question, answer.result()
    except BrokenProcessPool:
        _vacate(seat)
        return question, None
    except Cudal1Error as error:
        return question, error


def _twice_lost(question: MeasurementRequest) -> Iteration:
    task, program, *_ = question
    return Iteration(
        Measured(
            task.id, program.program, "run", detail="the process that measured it ended, twice"
        ),
        {},
    )


def _vacate(seat: _Seat) -> None:
    """End a slot's process, also during a request. The sandboxed processes end with it."""
    if seat.pool is not None:
        at_work = seat.answer is not None
        processes: Mapping[int, Any] = dict(getattr(seat.pool, "_processes", None) or {})
        # An executor cannot interrupt a running task, and an interrupted user would wait for it: so
        # the process is terminated.
        seat.pool.shutdown(wait=not at_work, cancel_futures=True)
        for process in processes.values() if at_work else ():
            process.terminate()
            process.join()
    seat.pool = seat.answer = seat.question = None
    seat.reference = ""


# Set in the process of a slot only.
_terms: MeasurementSettings | None = None
# Whether this process shares the GPU through a server.
_served = False
_lane: Slot | None = None


def _open_lane(terms: MeasurementSettings, threads: int, served: Mapping[str, str]) -> None:
    global _terms, _served
    torch.set_num_threads(threads)
    # Before CUDA is initialised, which reads these variables. The server's GPU is then device 0.
    set_environment(served)
    _terms, _served = replace(terms, device=torch.device("cuda")) if served else terms, bool(served)


def _in_lane(question: MeasurementRequest) -> Iteration:
    global _lane
    if _lane is None:
        assert _terms is not None
        _lane = Slot(_terms)
    if not _served:
        return _lane.measure(*question)
    sound = False
    try:
        lap = _lane.measure(*question)
        # Other outcomes may come from a fault of the GPU.
        sound = lap.measured.outcome in ("ok", "wrong", "compile")
        return lap
    finally:
        _ask_after_the_context(sound)


def _ask_after_the_context(sound: bool) -> None:
    """Test the context of this process. Raises SharedContextFault where it is lost."""
    # After a program that failed, its fault may take a moment to reach this context.
    if not sound:
        time.sleep(_SPREAD_S)
    try:
        # The copy to the host waits for the GPU, and so reports a fault.
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        raise SharedContextFault(str(error)) from error
