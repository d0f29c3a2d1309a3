"""SlotPool side by side, each in a process of its own, and which program goes to which lane.

A lane holds the inputs and the float64 results of one reference at a time, and to draw and compute
them anew takes as long as to judge a program or two. So a lane stays with a reference while
programs for it wait, and goes where most of them wait for each lane that is there already. A lane
whose process ends takes nobody else's work with it: what it was at is asked once more. One that
finds no memory on the GPU, or no process, is given up while there are others.

SlotPool for programs of ours share the GPU through a server (`mps`), where a fault of one program ends
the work of all. Each lane asks after its own context when a program is done, so no answer rests on
a fault of somebody else's: all lanes are ended then, and what they were at is asked again in a lane
apart, which has a context of its own. After some faults all lanes do without the server.
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

MeasurementRequest: TypeAlias = tuple[
    TrainingTask, Decoded, float | None, bool
]  # the task's best score so far; whether it was validated
# Of one lane on a GPU: five CUDA contexts (its own, the oracle's, the program's, that of surprises,
# the next program's) of 0.6 GiB with cuBLAS, three pieces of shared memory of 128 MiB, twice the
# results of one batch (1 GiB at most). With tensors of 32 MiB six lanes took 50 GiB of an H100.
_LANE_BYTES = 5 << 30
# tensors of the largest size: 20 sets of inputs with eager's and float64's results here, copies and
# a ring in the child
_SETS = 120
_SHARE = 0.9  # of the memory that is free
_CONTEXTS = 5  # of one lane, see above
_MOST_FAULTS = 3  # after which a server is worth less than what it costs to begin anew
_SPREAD_S = 0.05  # until a fault that ended a program has reached its lane's own context
# programs that wait for each lane at a reference: for fewer the lane that is there is as soon done
_WORTH_MOVING = 2


def count_fitting_slots(wanted: int, device: torch.device, tensor_bytes: int) -> int:
    """As many lanes as are wanted, or as fit into the free memory of a GPU where tensors have at
    most so many bytes; at least 1.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return wanted
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(wanted, int(_SHARE * free) // (_LANE_BYTES + _SETS * tensor_bytes)))


@dataclass
class _Seat:
    """One lane. `reference`: of the question it had last; `question`, `answer`: what it is at."""

    pool: ProcessPoolExecutor | None = None
    reference: str = ""
    question: MeasurementRequest | None = None
    answer: Future[Iteration] | None = None


class SharedContextFault(Cudal1Error, RuntimeError):
    """The GPU's context that all lanes share is gone, by whichever of their programs."""


class SlotPool:
    """`count` lanes, fewer where a server for all of them has no more room. Use from one thread;
    `close` ends their processes.

    `server`: what they share the GPU through, if anything. `faults`: how many programs have ended
    the work of all.
    """

    def __init__(self, terms: MeasurementSettings, count: int) -> None:
        self._terms = terms
        self.faults = 0
        self.server = self._begin_server(count)
        self._seats = [
            _Seat()
            for _ in range(min(count, mps.MOST_CLIENTS // _CONTEXTS) if self.server else count)
        ]
        self._apart = _Seat()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        for seat in (*self._seats, self._apart):
            _vacate(seat)
        if self.server is not None:
            self.server.close()

    @property
    def served(self) -> int:
        """How many lanes share the GPU through a server."""
        return len(self._seats) if self.server is not None else 0

    def _begin_server(self, count: int) -> mps.Mps | None:
        terms = self._terms
        worth = terms.mps and count > 1 and terms.trust == "own" and terms.device.type == "cuda"
        return mps.start(terms.device) if worth else None

    def answers(self, questions: Sequence[MeasurementRequest]) -> Iterator[Iteration | Cudal1Error]:
        """One for each question as it comes, not in order. Whoever ends the process of two lanes
        has failed.
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
                if seat.answer is None:  # ended meanwhile, with all others
                    continue
                question, answer = _taken(seat)
                name = (question[0].id, question[1].program)
                if isinstance(answer, SharedContextFault):
                    apart.extend((question, *self._begin_anew()))
                elif name not in again and self._lost(seat, answer):
                    again.add(name)
                    (apart if seat is self._apart else waiting[question[0].reference]).append(
                        question
                    )
                else:
                    yield answer or _twice_lost(question)

    def _begin_anew(self) -> list[MeasurementRequest]:
        """After a fault: end all lanes but the one apart, and their server. What they were at."""
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
        """Whether the lane is to blame, or this machine: its process ended, or found no memory or
        no process for the program.

        Who finds none is given up, so that the others have more of both; the last one is not.
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
        self._seats.remove(seat)
        return True

    def _next(self, seat: _Seat, waiting: dict[str, deque[MeasurementRequest]]) -> str:
        """The reference of which a free lane takes the next program; "" for none. A new one takes
        any: it starts soon or late.
        """
        if waiting.get(seat.reference):
            return seat.reference
        there = [other.reference for other in self._seats if other.question is not None]
        enough = 0 if seat.pool is None else _WORTH_MOVING
        worth = {
            reference: len(left) / (1 + there.count(reference))
            for reference, left in waiting.items()
            if left and len(left) >= enough * there.count(reference)
        }
        return max(worth, key=lambda reference: worth[reference], default="")

    def _give(self, seat: _Seat, question: MeasurementRequest) -> None:
        """Hand a question over; in a new process where the lane's was lost while it was idle."""
        seat.question, seat.reference = question, question[0].reference
        for _ in range(2):
            if seat.pool is None:
                context = get_context(
                    "forkserver"
                )  # lanes import torch once for all of them, and inherit no CUDA context
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
    """What a lane was at and its answer, None if its process ended; it is free then."""
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
    """End a lane's process, in the midst of its work if it is at any; the sandboxes' processes end
    with it.
    """
    if seat.pool is not None:
        at_work = seat.answer is not None
        processes: Mapping[int, Any] = dict(getattr(seat.pool, "_processes", None) or {})
        seat.pool.shutdown(wait=not at_work, cancel_futures=True)
        for process in processes.values() if at_work else ():
            process.terminate()
            process.join()
    seat.pool = seat.answer = seat.question = None
    seat.reference = ""


_terms: MeasurementSettings | None = None  # of this process, if it is one of these
_served = False  # whether it is one of those that share the GPU's context
_lane: Slot | None = None


def _open_lane(terms: MeasurementSettings, threads: int, served: Mapping[str, str]) -> None:
    global _terms, _served
    torch.set_num_threads(threads)
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
        sound = lap.measured.outcome in ("ok", "wrong", "compile")
        return lap
    finally:
        _ask_after_the_context(sound)


def _ask_after_the_context(sound: bool) -> None:
    """Raises SharedContextFault where it is gone. After a program that was not `sound` a fault may still be on
    its way here.
    """
    if not sound:
        time.sleep(_SPREAD_S)
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        raise SharedContextFault(str(error)) from error
