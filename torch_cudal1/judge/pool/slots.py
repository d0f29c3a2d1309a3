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
_SLOT_BYTES = 5 << 30
# Tensors of the largest size per slot: 20 input sets with the results of eager and float64 here,
# copies and a ring in the child.
_SETS = 120
# Of the free memory.
_SHARE = 0.9
# Of one slot, see above.
_CONTEXTS = 5
# After this number, starting again costs more than a server gains.
_MAX_FAULTS = 3
# Until a fault that ended a program has reached the context of its slot.
_SPREAD_S = 0.05
# Programs waiting per slot at a reference. With fewer, the present slot is done as soon as a second
# one would be.
_WORTH_MOVING = 2


def count_fitting_slots(count: int, device: torch.device, tensor_bytes: int) -> int:
    """How many slots, at most `count`, fit into the free memory of a GPU; at least 1.

    `tensor_bytes`: size of the largest tensor.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return count
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(count, int(_SHARE * free) // (_SLOT_BYTES + _SETS * tensor_bytes)))


@dataclass
class _SlotProcess:
    """One slot's process. `reference`: source of its last reference. `request`, `answer`: the
    request that it works on, and the future of its result.
    """

    pool: ProcessPoolExecutor | None = None
    reference: str = ""
    request: MeasurementRequest | None = None
    answer: Future[Iteration] | None = None


class SharedContextFault(Cudal1Error, RuntimeError):
    """The GPU context that all slots share is lost, through the program of any of them."""


class SlotPool:
    """`count` slots, or as many as an MPS server has room for. Use it from one thread; `close` ends
    their processes.

    `server`: the MPS server, or None. `faults`: how many programs have ended the work of all slots.
    """

    def __init__(self, config: MeasurementSettings, count: int) -> None:
        self._config = config
        self.faults = 0
        self.server = self._start_server(count)
        self._slots = [
            _SlotProcess()
            # The server refuses contexts beyond its limit.
            for _ in range(min(count, mps.MOST_CLIENTS // _CONTEXTS) if self.server else count)
        ]
        # Has no server: its context is its own.
        self._separate = _SlotProcess()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        for slot in (*self._slots, self._separate):
            _end_process(slot)
        if self.server is not None:
            self.server.close()

    @property
    def served(self) -> int:
        """How many slots share the GPU through a server."""
        return len(self._slots) if self.server is not None else 0

    def _start_server(self, count: int) -> mps.Mps | None:
        config = self._config
        is_worthwhile = (
            config.mps and count > 1 and config.trust == "own" and config.device.type == "cuda"
        )
        return mps.start(config.device) if is_worthwhile else None

    def iter_answers(
        self, requests: Sequence[MeasurementRequest]
    ) -> Iterator[Iteration | Cudal1Error]:
        """One answer for each request, in the order of completion. A program that ends the
        processes of two slots has failed.
        """
        waiting: dict[str, deque[MeasurementRequest]] = {}
        repeated: set[tuple[str, str]] = set()
        separate: deque[MeasurementRequest] = deque()
        for request in requests:
            waiting.setdefault(request[0].reference, deque()).append(request)
        while True:
            for slot in self._slots:
                if slot.request is None and (reference := self._choose_reference(slot, waiting)):
                    self._submit(slot, waiting[reference].popleft())
            if separate and self._separate.request is None:
                self._submit(self._separate, separate.popleft())
            busy = {
                slot.answer: slot
                for slot in (*self._slots, self._separate)
                if slot.answer is not None
            }
            if not busy:
                return
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                slot = busy[future]
                # Ended meanwhile, with all others, after a fault.
                if slot.answer is None:
                    continue
                request, answer = _take_answer(slot)
                name = (request[0].id, request[1].program)
                if isinstance(answer, SharedContextFault):
                    # Any of these programs may have caused the fault: each runs alone now.
                    separate.extend((request, *self._restart_slots()))
                elif name not in repeated and self._has_failed(slot, answer):
                    # Once: the process may have ended through another cause than this program.
                    repeated.add(name)
                    (separate if slot is self._separate else waiting[request[0].reference]).append(
                        request
                    )
                else:
                    yield answer or _make_failure(request)

    def _restart_slots(self) -> list[MeasurementRequest]:
        """After a fault: end all slots but the separate one, and start another server. Returns the
        requests that they worked on.
        """
        self.faults += 1
        telemetry.record("judge", "mps", "fault", faults=self.faults)
        interrupted = [slot.request for slot in self._slots if slot.request is not None]
        for slot in self._slots:
            _end_process(slot)
        if self.server is not None:
            self.server.close()
            self.server = (
                self._start_server(len(self._slots)) if self.faults < _MAX_FAULTS else None
            )
        return interrupted

    def _has_failed(self, slot: _SlotProcess, answer: Iteration | Cudal1Error | None) -> bool:
        """Whether the slot failed, and not the program: its process ended, or found no memory or no
        process.
        """
        if answer is None:
            telemetry.record("judge", "lane_lost", "training")
            return True
        if (
            not isinstance(answer, SandboxError | OutOfDeviceMemory)
            or len(self._slots) == 1
            or slot is self._separate
        ):
            return False
        telemetry.record(
            "judge", "lane_retired", "training", reason=str(answer), left=len(self._slots) - 1
        )
        _end_process(slot)
        # Given up, so that the others have more memory and processes; the last one stays.
        self._slots.remove(slot)
        return True

    def _choose_reference(
        self, slot: _SlotProcess, waiting: dict[str, deque[MeasurementRequest]]
    ) -> str:
        """The reference for whose programs a free slot works next; "" for none."""
        if waiting.get(slot.reference):
            return slot.reference
        occupied = [other.reference for other in self._slots if other.request is not None]
        # A new slot takes any reference, as it must start sooner or later.
        min_waiting = 0 if slot.pool is None else _WORTH_MOVING
        programs_per_slot = {
            reference: len(queue) / (1 + occupied.count(reference))
            for reference, queue in waiting.items()
            if queue and len(queue) >= min_waiting * occupied.count(reference)
        }
        return max(
            programs_per_slot, key=lambda reference: programs_per_slot[reference], default=""
        )

    def _submit(self, slot: _SlotProcess, request: MeasurementRequest) -> None:
        """Submit a request to a slot; in a new process where its process ended while idle."""
        slot.request, slot.reference = request, request[0].reference
        # A pool reports the end of its idle process only when a request is submitted.
        for _ in range(2):
            if slot.pool is None:
                # Slots import torch once for all, and inherit no CUDA context.
                context = get_context("forkserver")
                context.set_forkserver_preload([__name__])
                served = (
                    self.server.variables
                    if self.server is not None and slot is not self._separate
                    else {}
                )
                slot.pool = ProcessPoolExecutor(
                    1, context, _open_slot, (self._config, torch.get_num_threads(), served)
                )
            try:
                slot.answer = slot.pool.submit(_measure_in_slot, request)
                return
            except BrokenProcessPool:
                _end_process(slot)
        raise BrokenProcessPool("a new measuring process broke before it was used")


def _take_answer(slot: _SlotProcess) -> tuple[MeasurementRequest, Iteration | Cudal1Error | None]:
    """Take the finished request of a slot and its answer, None if its process ended."""
    assert slot.request is not None
    assert slot.answer is not None
    request, answer = slot.request, slot.answer
    slot.request = slot.answer = None
    try:
        return request, answer.result()
    except BrokenProcessPool:
        _end_process(slot)
        return request, None
    except Cudal1Error as error:
        return request, error


def _make_failure(request: MeasurementRequest) -> Iteration:
    task, program, *_ = request
    return Iteration(
        Measured(
            task.id, program.program, "run", detail="the process that measured it ended, twice"
        ),
        {},
    )


def _end_process(slot: _SlotProcess) -> None:
    """End a slot's process, also during a request. The sandboxed processes end with it."""
    if slot.pool is not None:
        is_busy = slot.answer is not None
        processes: Mapping[int, Any] = dict(getattr(slot.pool, "_processes", None) or {})
        # An executor cannot interrupt a running task, and an interrupted user would wait for it: so
        # the process is terminated.
        slot.pool.shutdown(wait=not is_busy, cancel_futures=True)
        for process in processes.values() if is_busy else ():
            process.terminate()
            process.join()
    slot.pool = slot.answer = slot.request = None
    slot.reference = ""


# Set in the process of a slot only.
_config: MeasurementSettings | None = None
# Whether this process shares the GPU through a server.
_served = False
_slot: Slot | None = None


def _open_slot(config: MeasurementSettings, threads: int, served: Mapping[str, str]) -> None:
    global _config, _served
    torch.set_num_threads(threads)
    # Before CUDA is initialised, which reads these variables. The server's GPU is then device 0.
    set_environment(served)
    _config, _served = (
        replace(config, device=torch.device("cuda")) if served else config,
        bool(served),
    )


def _measure_in_slot(request: MeasurementRequest) -> Iteration:
    global _slot
    if _slot is None:
        assert _config is not None
        _slot = Slot(_config)
    if not _served:
        return _slot.measure(*request)
    sound = False
    try:
        iteration = _slot.measure(*request)
        # Other outcomes may come from a fault of the GPU.
        sound = iteration.measured.outcome in ("ok", "wrong", "compile")
        return iteration
    finally:
        _check_context(sound)


def _check_context(sound: bool) -> None:
    """Test the context of this process. Raises SharedContextFault where it is lost."""
    # After a program that failed, its fault may take a moment to reach this context.
    if not sound:
        time.sleep(_SPREAD_S)
    try:
        # The copy to the host waits for the GPU, and so reports a fault.
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        raise SharedContextFault(str(error)) from error
