"""What a child does for the detectors of memory, environment and resources: calls under other
conditions, and raw counts.

Fresh memory is filled with a pattern, inputs lie between bands, launches are left out, calls are
repeated, and what the process holds is counted. It compares nothing: outputs, digests and counts go
to the parent. On the host, fresh memory is filled by glibc (`judge.worker.heap`), without a word to
PyTorch; on a GPU the free blocks of PyTorch's allocator are filled, so memory that a candidate gets
from the driver itself, and the private pool of a CUDA graph, are not.
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

from torch_cudal1.ir.check import used_values
from torch_cudal1.ir.interpreter import interpret, skip_launch
from torch_cudal1.ir.program import Alloc, Call, Launch, Program
from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.wire.channel import storage_extent
from torch_cudal1.judge.wire.transport import read_program
from torch_cudal1.judge.worker import heap
from torch_cudal1.judge.worker.global_state import stir, surroundings
from torch_cudal1.judge.worker.guard_pages import Side, at_edge
from torch_cudal1.judge.worker.raw_copy import raw_tensors, refuse_lazy
from torch_cudal1.judge.worker.redzones import Bands, Fences

if TYPE_CHECKING:
    from torch_cudal1.judge.worker.session import Session

__all__ = ["VERBS", "fill_free_blocks"]

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
_SMALL_BYTES = 1 << 20  # PyTorch's caching allocator: kSmallSize
_NOISE = (
    1_000.0  # far from any result, and far from infinity in every floating type of 16 bits and more
)
_NOISY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ASYNC_COMPILE, _POOLED = "torch._inductor.async_compile", "torch/_inductor/async_compile.py"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_list, _read, _frames = os.listdir, Path.read_text, sys._current_frames


def _surroundings(session: Session, request: Request) -> Answer:
    """What is global in this process now. `stir`: a seed for all global generators first. `tables`:
    with all identities.
    """
    if "stir" in request:
        stir(int(request["stir"]))
    return {"surroundings": surroundings(session.device, tables=bool(request.get("tables")))}


def _forget(session: Session, request: Request) -> Answer:
    """Let go of what is in a slot."""
    session.slots.pop(request["slot"], None)
    gc.collect()
    return {}


def _poisoned(session: Session, request: Request) -> Answer:
    """Call a slot where all fresh memory holds a byte (if asked for, in `deterministic` mode), or
    (byte null) what PyTorch fills it with in that mode.
    """
    inputs, byte = session.sets[request["inputs"]], request["byte"]
    fill = _deterministic(fill=True) if byte is None else _filled(int(byte), session.device)
    mode = _deterministic(fill=False) if request["deterministic"] else nullcontext()
    with mode, fill as control, torch.no_grad():
        outputs = session.slots[request["slot"]](inputs)
        refuse_lazy(outputs)
        synchronise(session.device)
    return {"layout": raw_tensors(outputs, Path(request["path"])), "control": control}


@contextmanager
def _filled(byte: int, device: torch.device) -> Iterator[bool]:
    """Yields whether fresh memory really holds the byte."""
    if device.type == "cuda":
        fill_free_blocks(byte, device)
        yield True
        return
    with heap.filled(byte) as done:
        yield done


def fill_free_blocks(byte: int, device: torch.device, *, everywhere: bool = False) -> None:
    """Take every block that PyTorch's allocator has ready for the default stream, or for any
    (`everywhere`: all must still be there), largest first so that each finds its own, fill it and
    give it back.
    """
    torch.cuda.synchronize(device)
    here = torch.cuda.current_device()
    sizes: dict[int, list[int]] = defaultdict(list)
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] == here and (everywhere or not segment["stream"]):
            free = [
                int(block["size"]) for block in segment["blocks"] if block["state"] == "inactive"
            ]
            small = segment["segment_type"] == "small"
            sizes[segment["stream"]] += [
                size for whole in free for size in _requests(whole, small=small)
            ]
    taken = []
    for stream, wanted in sizes.items():
        with (
            torch.cuda.stream(torch.cuda.ExternalStream(stream, device))
            if stream
            else nullcontext()
        ):
            taken += [
                torch.empty(size, dtype=torch.uint8, device=device).fill_(byte)
                for size in sorted(wanted, reverse=True)
            ]
    torch.cuda.synchronize(device)
    del taken


def _requests(size: int, *, small: bool) -> list[int]:
    """What to ask for to get a whole free block: segments for small blocks serve requests of up to
    1 MiB only.
    """
    pieces, rest = divmod(size, _SMALL_BYTES) if small else (0, size)
    return [_SMALL_BYTES] * pieces + [rest] * bool(rest)


@contextmanager
def _deterministic(*, fill: bool) -> Iterator[bool]:
    """PyTorch's deterministic mode; where it may `fill`, floating memory is NaN, integers are their
    largest value.
    """
    deterministic: Any = torch.utils.deterministic
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = fill
    try:
        yield bool(torch.empty(64).isnan().all())
    finally:
        torch.use_deterministic_algorithms(
            enabled, warn_only=warn_only
        )  # the debug mode would forget `warn_only`
        deterministic.fill_uninitialized_memory = filled


def _banded(session: Session, request: Request) -> Answer:
    """Call a slot on inputs that lie between bands, and on a GPU with free memory that lies between
    fences.

    Answers what the bands hold afterwards, as digests.
    """
    given, seed, device = session.sets[request["inputs"]], int(request["seed"]), session.device
    bands = {index: Bands.around(given[index], seed + index) for index in request["positions"]}
    inputs = [
        bands[index].tensor if index in bands else tensor for index, tensor in enumerate(given)
    ]
    fences = Fences.between(request["holes"], seed, device) if device.type == "cuda" else None
    with torch.no_grad():
        outputs = session.slots[request["slot"]](inputs)
    refuse_lazy(outputs)
    synchronise(device)
    layout = raw_tensors(outputs, Path(request["path"]))
    return {
        "layout": layout,
        "bands": {str(index): found.digest() for index, found in bands.items()},
        "fences": fences.digests() if fences else [],
        "allocated": [
            found.digest() for found in getattr(session.slots[request["slot"]], "bands", ())
        ],
    }


class _Instrumented:
    """A Program in plain Python: one launch left out, or the memory of each Alloc between bands or
    at the edge of its pages.

    With a byte to fill with, every Alloc holds it when a launch first gets it: memory that an
    earlier step of the same call had, and let go of, may hold just what a launch that is left out
    would have written. "noise": floating-point tensors hold large numbers that differ, none of them
    infinite, others the byte 1.
    """

    def __init__(self, program: Program, device: torch.device, request: Request) -> None:
        self.bands: list[Bands] = []
        self.launches = 0
        self._skip: int = request["skip"]
        self._seed: int | None = request["seed"]
        self._fill: int | Literal["noise"] | None = request["fill"]
        self._side: Side | None = request["side"]
        self._at_edge: dict[
            int, torch.Tensor
        ] = {}  # by id, kept alive: the id of a dead tensor is soon another's
        self._allocated = {id(step): (outs, fresh) for step, outs, fresh in _launches(program)}
        self._run = interpret(program, device, launcher=self._launcher)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        self.bands.clear()
        self._at_edge.clear()
        return self._run(inputs)

    def _launcher(
        self, cubin: torch.Tensor, launch: Launch, device: torch.device
    ) -> Callable[[list[Any]], None]:
        self.launches += 1
        outs, fresh = self._allocated[id(launch)]
        if self.launches - 1 == self._skip:
            start = skip_launch(cubin, launch, device)
        else:
            from torch_cudal1.device.cuda.driver import (
                prepare_launch,
            )  # needs libcuda: only where something is launched

            start = prepare_launch(cubin, launch, device)
        if self._fill is not None:
            return lambda values: start(self._filled(values, fresh))
        if self._side is not None:
            return lambda values: start(self._moved(values, outs))
        return start if self._seed is None else lambda values: start(self._surrounded(values, outs))

    def _filled(self, values: list[Any], fresh: Iterable[int]) -> list[Any]:
        for out in fresh:
            whole = values[out].as_strided(
                (storage_extent(values[out].shape, values[out].stride()),), (1,)
            )
            if self._fill == "noise" and whole.dtype in _NOISY:
                whole.normal_(std=_NOISE, generator=torch.Generator(whole.device).manual_seed(out))
            else:
                whole.view(torch.uint8).fill_(1 if self._fill == "noise" else self._fill)
        return values

    def _moved(self, values: list[Any], outs: Iterable[int]) -> list[Any]:
        """The values, those of Alloc steps moved to the edge of pages of their own if they are not
        there yet.
        """
        assert self._side is not None
        for out in outs:
            if id(values[out]) not in self._at_edge:
                values[out] = at_edge(values[out], self._side)
                self._at_edge[id(values[out])] = values[out]
        return values

    def _surrounded(self, values: list[Any], outs: Iterable[int]) -> list[Any]:
        """The values, those of Alloc steps moved between bands if they are not there yet."""
        assert self._seed is not None
        known = {id(found.tensor) for found in self.bands}
        for out in outs:
            if id(values[out]) not in known:
                self.bands.append(Bands.around(values[out], self._seed + len(self.bands)))
                values[out] = self.bands[-1].tensor
        return values


def _launches(program: Program) -> Iterator[tuple[Launch, list[int], list[int]]]:
    """Each launch with the Alloc values it gets, and those of them that no step before it got;
    nested Programs included.
    """
    allocated = {step.out for step in program.steps if isinstance(step, Alloc)}
    fresh = set(allocated)
    for step in program.steps:
        got = allocated & set(used_values(step))
        if isinstance(step, Launch):
            yield step, sorted(got), sorted(got & fresh)
        fresh -= got
        if isinstance(step, Call):
            yield from _launches(step.program)


def _instrument(session: Session, request: Request) -> Answer:
    """Put a Program into a slot, as `_Instrumented` runs it: launch number `skip` left out (-1:
    none), with a `seed` each Alloc between bands, with a `side` each at the edge of its pages, with
    a byte to `fill` each full of that.
    """
    program = read_program(request["program"], request["payloads"])
    session.slots[request["slot"]] = _Instrumented(program, session.device, request)
    return {}


def _many(session: Session, request: Request) -> Answer:
    """Call a slot again and again, keeping nothing; then what the process holds."""
    inputs, run = session.sets[request["inputs"]], session.slots[request["slot"]]
    with torch.no_grad():
        for _ in range(int(request["calls"])):
            run(inputs)
    synchronise(session.device)
    gc.collect()
    return _usage(session, request)


def _usage(session: Session, request: Request) -> Answer:
    """Bytes, threads, descriptors and processes of this process now."""
    pages = _read(Path("/proc/self/statm")).split()
    usage: dict[str, Any] = {
        "resident_bytes": int(pages[1]) * _PAGE,
        "data_bytes": int(pages[5]) * _PAGE,
        "threads": len(_list("/proc/self/task")),
        "descriptors": len(_list("/proc/self/fd")),
        "children": _children(),
        "files": _count_files(session.scratch),
        "python_threads": _python_threads(),
    }
    if session.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(session.device)
        usage |= {
            "gpu_bytes": torch.cuda.memory_allocated(session.device),
            "gpu_used_bytes": total - free,
        }
    return {"usage": usage}


def _count_files(scratch: Path) -> int:
    """Files in the scratch folder. What is mounted below it, such as the root of a confined
    process, is not in it.
    """
    count = 0
    for folder, folders, files in os.walk(scratch):
        folders[:] = [name for name in folders if not os.path.ismount(os.path.join(folder, name))]
        count += len(files)
    return count


def _children() -> list[str]:
    """Command lines of the processes that this one has started and that still run."""
    found = []
    for task in _list("/proc/self/task"):
        path = Path(f"/proc/self/task/{task}/children")
        for child in _read(path).split() if path.exists() else ():
            command = Path(f"/proc/{child}/cmdline")
            found.append(_read(command).replace("\0", " ")[:200] if command.exists() else child)
    return sorted(found)


def _python_threads() -> list[str]:
    """Of each Python thread but this one: the files its stack goes through, outermost first. One of
    Inductor's pool begins with the pool's own file, which an idle worker's stack does not show.
    """
    stacks, pooled = [], _compilers_pool()
    for ident, innermost in _frames().items():
        files: list[str] = []
        frame: FrameType | None = innermost
        while frame is not None:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        if ident != threading.get_ident():
            stacks.append(" ".join([*([_POOLED] if ident in pooled else ()), *reversed(files)]))
    return sorted(stacks)


def _compilers_pool() -> set[int | None]:
    """The threads in which Inductor compiles, if it has any: it keeps them for good."""
    pool = getattr(getattr(sys.modules.get(_ASYNC_COMPILE), "AsyncCompile", None), "pool", None)
    if pool is None or not pool.cache_info().currsize:
        return set()
    return {thread.ident for thread in pool()._threads}


VERBS: dict[str, Callable[[Session, Request], Answer]] = {
    "surroundings": _surroundings,
    "forget": _forget,
    "poisoned": _poisoned,
    "banded": _banded,
    "instrument": _instrument,
    "many": _many,
    "usage": _usage,
}
