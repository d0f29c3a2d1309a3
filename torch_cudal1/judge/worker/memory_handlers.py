"""RPC handlers of the checks of memory: contents of fresh memory, redzones, guard blocks, omitted
launches, and resource usage.

They instrument a call and answer its outputs and digests; the parent compares them.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from torch_cudal1.ir.interpreter import interpret, skip_launch
from torch_cudal1.ir.program import Alloc, Call, Launch, Program
from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.wire.channel import storage_extent
from torch_cudal1.judge.wire.transport import read_program
from torch_cudal1.judge.worker import heap
from torch_cudal1.judge.worker.global_state import read_global_state, reseed_generators
from torch_cudal1.judge.worker.guard_pages import Side, copy_to_edge
from torch_cudal1.judge.worker.raw_copy import refuse_lazy, save_raw_tensors
from torch_cudal1.judge.worker.redzone_tensors import GuardBlocks, Redzones

if TYPE_CHECKING:
    from torch_cudal1.judge.worker.session import Session

__all__ = ["HANDLERS", "fill_free_blocks"]

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
# kSmallSize of PyTorch's caching allocator.
_SMALL_BYTES = 1 << 20
# Far from any result, and far from infinity in every floating type of 16 bits and more.
_NOISE_STD = 1_000.0
_NOISE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ASYNC_COMPILE_MODULE, _ASYNC_COMPILE_FILE = (
    "torch._inductor.async_compile",
    "torch/_inductor/async_compile.py",
)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Bound at import, before any candidate, which may patch them.
_list_folder, _read_text, _current_frames = os.listdir, Path.read_text, sys._current_frames


def _read_global_state(session: Session, request: Request) -> Answer:
    """The present global state of this process.

    `stir`: a seed for all global generators, set first. `tables`: include all object identities.
    """
    if "stir" in request:
        reseed_generators(int(request["stir"]))
    state = read_global_state(
        session.device,
        tables=bool(request.get("tables")),
        operators=bool(request.get("operators")),
    )
    return {"surroundings": state}


def _forget(session: Session, request: Request) -> Answer:
    """Empty a slot."""
    session.slots.pop(request["slot"], None)
    # A module with reference cycles keeps its memory until a collection.
    gc.collect()
    return {}


def _run_poisoned(session: Session, request: Request) -> Answer:
    """Call a slot while all fresh memory holds `byte`; for null, the values with which PyTorch's
    deterministic mode fills it.

    `deterministic`: call it in that mode, without its fill. `control` in the answer: whether fresh
    memory really was filled.
    """
    inputs, byte = session.sets[request["inputs"]], request["byte"]
    fill = (
        _run_deterministically(fill=True)
        if byte is None
        else _fill_fresh_memory(int(byte), session.device)
    )
    # The deterministic algorithms are others, less exact ones, so filling must not depend on them.
    mode = _run_deterministically(fill=False) if request["deterministic"] else nullcontext()
    with mode, fill as control, torch.no_grad():
        outputs = session.slots[request["slot"]](inputs)
        refuse_lazy(outputs)
        synchronise(session.device)
    return {"layout": save_raw_tensors(outputs, Path(request["path"])), "control": control}


@contextmanager
def _fill_fresh_memory(byte: int, device: torch.device) -> Iterator[bool]:
    """Fill fresh memory with `byte` during the body; yields whether it really holds the byte."""
    if device.type == "cuda":
        fill_free_blocks(byte, device)
        yield True
        return
    with heap.fill_fresh(byte) as is_filled:
        yield is_filled


def fill_free_blocks(byte: int, device: torch.device, *, everywhere: bool = False) -> None:
    """Fill all free blocks of PyTorch's allocator with `byte`: those of the default stream, or of
    all streams (`everywhere`; each of them must still exist).

    Memory that a candidate gets from the driver, and the private pool of a CUDA graph, are not
    filled.
    """
    torch.cuda.synchronize(device)
    here = torch.cuda.current_device()
    sizes: dict[int, list[int]] = defaultdict(list)
    for segment in torch.cuda.memory_snapshot():
        # The allocator gives a block only to requests on its stream.
        if segment["device"] == here and (everywhere or not segment["stream"]):
            free_sizes = [
                int(block["size"]) for block in segment["blocks"] if block["state"] == "inactive"
            ]
            small = segment["segment_type"] == "small"
            sizes[segment["stream"]] += [
                size for block in free_sizes for size in _split_block(block, small=small)
            ]
    blocks = []
    for stream, stream_sizes in sizes.items():
        with (
            torch.cuda.stream(torch.cuda.ExternalStream(stream, device))
            if stream
            else nullcontext()
        ):
            # Largest first: a smaller request would be cut off a larger block.
            blocks += [
                torch.empty(size, dtype=torch.uint8, device=device).fill_(byte)
                for size in sorted(stream_sizes, reverse=True)
            ]
    torch.cuda.synchronize(device)
    # Freed together: a block freed early would serve a later request of the loop.
    del blocks


def _split_block(size: int, *, small: bool) -> list[int]:
    """The sizes of the requests that take a whole free block."""
    # Segments for small blocks serve only requests of up to 1 MiB.
    count, rest = divmod(size, _SMALL_BYTES) if small else (0, size)
    return [_SMALL_BYTES] * count + [rest] * bool(rest)


@contextmanager
def _run_deterministically(*, fill: bool) -> Iterator[bool]:
    """Run the body in PyTorch's deterministic mode. With `fill`, uninitialised floats are NaN and
    integers their largest value. Yields whether memory is filled so.
    """
    deterministic: Any = torch.utils.deterministic
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill_before = deterministic.fill_uninitialized_memory
    # Warnings only: an operator without a deterministic algorithm must still run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = fill
    try:
        yield bool(torch.empty(64).isnan().all())
    finally:
        # Not `set_deterministic_debug_mode`, which would lose `warn_only`.
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill_before


def _run_in_redzones(session: Session, request: Request) -> Answer:
    """Call a slot on inputs that lie between redzones; on a GPU also with free memory between guard
    blocks. Answers the digests of both after the call.
    """
    tensors, seed, device = session.sets[request["inputs"]], int(request["seed"]), session.device
    redzones = {
        index: Redzones.around(tensors[index], seed + index) for index in request["positions"]
    }
    inputs = [
        redzones[index].tensor if index in redzones else tensor
        for index, tensor in enumerate(tensors)
    ]
    guards = GuardBlocks.between(request["holes"], seed, device) if device.type == "cuda" else None
    run = session.slots[request["slot"]]
    with torch.no_grad():
        outputs = run(inputs)
    refuse_lazy(outputs)
    synchronise(device)
    layout = save_raw_tensors(outputs, Path(request["path"]))
    return {
        "layout": layout,
        "bands": {str(index): redzone.digest() for index, redzone in redzones.items()},
        "fences": guards.digests() if guards else [],
        "allocated": [redzone.digest() for redzone in getattr(run, "redzones", ())],
    }


class _InstrumentedProgram:
    """A Program run by the interpreter, with one launch omitted, or with the memory of each Alloc
    step between redzones, at the edge of its pages, or filled.

    A fill of "noise" writes large finite numbers that differ into floating-point tensors, and the
    byte 1 into others.
    """

    def __init__(self, program: Program, device: torch.device, request: Request) -> None:
        self.redzones: list[Redzones] = []
        self.launches = 0
        self._skip: int = request["skip"]
        self._seed: int | None = request["seed"]
        self._fill: int | Literal["noise"] | None = request["fill"]
        self._side: Side | None = request["side"]
        # By id, and kept alive: the id of a dead tensor may soon be that of another.
        self._at_edge: dict[int, torch.Tensor] = {}
        self._allocated = {id(step): (outs, fresh) for step, outs, fresh in _launches(program)}
        self._run = interpret(program, device, launcher=self._make_launcher)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        self.redzones.clear()
        self._at_edge.clear()
        return self._run(inputs)

    def _make_launcher(
        self, cubin: torch.Tensor, launch: Launch, device: torch.device
    ) -> Callable[[list[Any]], None]:
        self.launches += 1
        outs, fresh = self._allocated[id(launch)]
        if self.launches - 1 == self._skip:
            start = skip_launch(cubin, launch, device)
        else:
            # Imported here, as it needs libcuda: only where a launch runs.
            from torch_cudal1.device.cuda.driver import prepare_launch

            start = prepare_launch(cubin, launch, device)
        # At the launch, not at the Alloc step: memory that an earlier step of the same call had,
        # and freed, may hold just what the omitted launch would have written.
        if self._fill is not None:
            return lambda values: start(self._fill_fresh(values, fresh))
        if self._side is not None:
            return lambda values: start(self._move_to_edge(values, outs))
        return (
            start
            if self._seed is None
            else lambda values: start(self._move_into_redzones(values, outs))
        )

    def _fill_fresh(self, values: list[Any], fresh: Iterable[int]) -> list[Any]:
        for out in fresh:
            # The whole span, with the gaps between strides.
            memory = values[out].as_strided(
                (storage_extent(values[out].shape, values[out].stride()),), (1,)
            )
            if self._fill == "noise" and memory.dtype in _NOISE_DTYPES:
                generator = torch.Generator(memory.device).manual_seed(out)
                memory.normal_(std=_NOISE_STD, generator=generator)
            else:
                memory.view(torch.uint8).fill_(1 if self._fill == "noise" else self._fill)
        return values

    def _move_to_edge(self, values: list[Any], outs: Iterable[int]) -> list[Any]:
        """The arguments of a launch, with the tensors of Alloc steps moved to the edge of their own
        pages, unless they were moved before.
        """
        assert self._side is not None
        for out in outs:
            if id(values[out]) not in self._at_edge:
                values[out] = copy_to_edge(values[out], self._side)
                self._at_edge[id(values[out])] = values[out]
        return values

    def _move_into_redzones(self, values: list[Any], outs: Iterable[int]) -> list[Any]:
        """The arguments of a launch, with the tensors of Alloc steps moved between redzones."""
        assert self._seed is not None
        surrounded = {id(redzone.tensor) for redzone in self.redzones}
        for out in outs:
            if id(values[out]) not in surrounded:
                seed = self._seed + len(self.redzones)
                self.redzones.append(Redzones.around(values[out], seed))
                values[out] = self.redzones[-1].tensor
        return values


def _launches(program: Program) -> Iterator[tuple[Launch, list[int], list[int]]]:
    """Each launch, with the numbers of the Alloc values that it gets, and of those that no earlier
    step got. Includes the launches of nested Programs.
    """
    allocated = {step.out for step in program.steps if isinstance(step, Alloc)}
    fresh = set(allocated)
    for step in program.steps:
        got = allocated & set(step.reads)
        if isinstance(step, Launch):
            yield step, sorted(got), sorted(got & fresh)
        fresh -= got
        if isinstance(step, Call):
            yield from _launches(step.program)


def _instrument(session: Session, request: Request) -> Answer:
    """Put an `_InstrumentedProgram` into a slot.

    - skip: number of the launch to omit, -1 for none.
    - seed: put each Alloc between redzones. side: put it at the edge of its pages.
    - fill: a byte, or "noise", for each Alloc.
    """
    program = read_program(request["program"], request["payloads"])
    session.slots[request["slot"]] = _InstrumentedProgram(program, session.device, request)
    return {}


def _run_many(session: Session, request: Request) -> Answer:
    """Call a slot `calls` times, drop the outputs, and answer the resource usage."""
    inputs, run = session.sets[request["inputs"]], session.slots[request["slot"]]
    with torch.no_grad():
        # The outputs die at once, so memory that grows is kept by the candidate.
        for _ in range(int(request["calls"])):
            run(inputs)
    synchronise(session.device)
    # Garbage that waits for a collection is no leak.
    gc.collect()
    return _read_usage(session, request)


def _read_usage(session: Session, request: Request) -> Answer:
    """Memory in bytes, threads, descriptors, child processes and files of this process now."""
    pages = _read_text(Path("/proc/self/statm")).split()
    usage: dict[str, Any] = {
        "resident_bytes": int(pages[1]) * _PAGE_BYTES,
        "data_bytes": int(pages[5]) * _PAGE_BYTES,
        # All threads, also native ones that Python does not know.
        "threads": len(_list_folder("/proc/self/task")),
        "descriptors": len(_list_folder("/proc/self/fd")),
        "children": _list_children(),
        "files": _count_files(session.scratch),
        "python_threads": _list_python_threads(),
    }
    if session.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(session.device)
        usage |= {
            "gpu_bytes": torch.cuda.memory_allocated(session.device),
            # Of the whole GPU: PyTorch does not count what a candidate takes from the driver.
            "gpu_used_bytes": total - free,
        }
    return {"usage": usage}


def _count_files(scratch: Path) -> int:
    """Number of files in the scratch folder."""
    count = 0
    for folder, folders, files in os.walk(scratch):
        # Not those that are mounted below it: at level 3 the root of the namespace is there.
        folders[:] = [name for name in folders if not os.path.ismount(os.path.join(folder, name))]
        count += len(files)
    return count


def _list_children() -> list[str]:
    """Command lines of the running child processes of this process."""
    commands = []
    # Linux lists children by the thread that started them.
    for task in _list_folder("/proc/self/task"):
        path = Path(f"/proc/self/task/{task}/children")
        for child in _read_text(path).split() if path.exists() else ():
            command = Path(f"/proc/{child}/cmdline")
            commands.append(
                _read_text(command).replace("\0", " ")[:200] if command.exists() else child
            )
    return sorted(commands)


def _list_python_threads() -> list[str]:
    """For each Python thread but this one: the files of its stack, outermost first, as one text."""
    stacks, pool_threads = [], _find_inductor_threads()
    for ident, innermost in _current_frames().items():
        files: list[str] = []
        frame: FrameType | None = innermost
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        if ident != threading.get_ident():
            # The stack of an idle thread of Inductor's pool does not show whose it is, so the file
            # of the pool is added.
            stacks.append(
                " ".join(
                    [*([_ASYNC_COMPILE_FILE] if ident in pool_threads else ()), *reversed(files)]
                )
            )
    return sorted(stacks)


def _find_inductor_threads() -> set[int | None]:
    """Idents of the threads in which Inductor compiles. It keeps them for the whole process."""
    pool = getattr(
        getattr(sys.modules.get(_ASYNC_COMPILE_MODULE), "AsyncCompile", None), "pool", None
    )
    # Calling `pool` would make one.
    if pool is None or not pool.cache_info().currsize:
        return set()
    return {thread.ident for thread in pool()._threads}


HANDLERS: dict[str, Callable[[Session, Request], Answer]] = {
    "surroundings": _read_global_state,
    "forget": _forget,
    "poisoned": _run_poisoned,
    "banded": _run_in_redzones,
    "instrument": _instrument,
    "many": _run_many,
    "usage": _read_usage,
}
