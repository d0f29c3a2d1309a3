"""Serves the judge's requests in a child process: loads Programs, runs them on input sets, answers
raw facts. Started as `python -m torch_cudal1.judge.worker.session FD`.

This process holds no reference result, no tolerance and no verdict: the parent compares and
decides. A test keeps every module of `evaluate`, `checks` and `reference` out of it. Its standard
output has no meaning. An exception in a request is answered as an error; the parent notices when
the process ends.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import torch

from torch_cudal1.core.errors import Cudal1Error, SandboxError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.device.gpu_memory import make_room
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.benchmark.rotating_inputs import RotatingCalls, RotatingInputs
from torch_cudal1.judge.wire import precision_rights
from torch_cudal1.judge.wire.arena import Arena, lend, lend_also, open_arena, return_to_first
from torch_cudal1.judge.wire.call_spec import CallSpec, RunMode
from torch_cudal1.judge.wire.channel import Channel, load_tensors, save_tensors
from torch_cudal1.judge.wire.properties import describe
from torch_cudal1.judge.wire.transport import read_program, require_tensor, write_payloads
from torch_cudal1.judge.worker import (
    audit_hooks,
    guard_pages,
    int64_handlers,
    memory_handlers,
    state_handlers,
    timing_handlers,
)
from torch_cudal1.judge.worker.global_state import read_global_state
from torch_cudal1.judge.worker.headers import keep_headers
from torch_cudal1.judge.worker.kernel_compile import compile_ahead
from torch_cudal1.judge.worker.lockdown import lock_down
from torch_cudal1.judge.worker.modules.module_runner import ModuleRunner
from torch_cudal1.judge.worker.modules.source_modules import describe_reference, import_source
from torch_cudal1.judge.worker.raw_copy import RefusedOutput, refuse_lazy, save_raw_tensors
from torch_cudal1.runtime.runner import build_runner

__all__ = ["HANDLERS", "Handler", "Request", "Session", "main"]

Request: TypeAlias = Mapping[str, Any]
# NaN in every floating type.
_ERASED_BYTE = 0xFF


@dataclass
class Session:
    """The state of one child.

    - slots: name -> callable. sets: name -> input tensors. held: outputs kept alive.
    - copied: of the last timed batch, the number of a call and a copy of its outputs.
    - static: positions of inputs that keep their values from call to call.
    - rings: input sets in rotation, for timing. sides: the two callables that `warm` prepared.
    - first_us: slot -> microseconds of its first call. host_us: slot -> microseconds of host time
      to queue one call, at the last measurement.
    """

    device: torch.device
    scratch: Path = Path()
    slots: dict[str, Runner] = field(default_factory=dict)
    static: frozenset[int] = frozenset()
    sets: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    held: list[list[torch.Tensor | None]] = field(default_factory=list)
    copied: tuple[int, list[torch.Tensor | None]] | None = None
    rings: dict[tuple[str, ...], RotatingInputs] = field(default_factory=dict)
    sides: tuple[RotatingCalls, RotatingCalls] | None = None
    first_us: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)

    def turn_ring(self, request: Request) -> RotatingInputs:
        """The ring of the request's input sets, rotated by its `shift`."""
        names = tuple(request["sets"])
        if names not in self.rings:
            self.rings[names] = RotatingInputs([self.sets[name] for name in names], self.static)
        self.rings[names].rotate(int(request.get("shift", 0)))
        return self.rings[names]

    def warm_sides(self) -> tuple[RotatingCalls, RotatingCalls]:
        """The two sides that `warm` prepared. Raises SandboxError before that request."""
        if self.sides is None:
            raise SandboxError("timing", "nothing was warmed; expected the request `warm` first")
        return self.sides


def _answer_hello(session: Session, request: Request) -> dict[str, Any]:
    session.device = torch.device(request["device"])
    session.scratch = Path(request["scratch"])
    torch.set_num_threads(int(request["threads"]))
    precision_rights.apply(request["flags"])
    lock_down(request, session.device)
    refusal = _open_arena(session, request.get("arena"), lend)
    gc.collect()
    # Imported objects never become garbage, so later collections need not visit them.
    gc.freeze()
    audit_hooks.watch()
    return {
        "pid": os.getpid(),
        "torch": torch.__version__,
        "unshared": refusal.reason if refusal else "",
        # Before any candidate: the parent compares later states with this one.
        "surroundings": read_global_state(session.device, operators=not request["own"]),
    }


def _open_arena(
    session: Session,
    handle_and_size: Sequence[Any] | None,
    register: Callable[[Path, Arena], None],
) -> Refusal | None:
    """Open the parent's arena."""
    if handle_and_size is None:
        return Refusal("none was given")
    handle, size_bytes = str(handle_and_size[0]), int(handle_and_size[1])
    try:
        register(session.scratch, open_arena(handle, size_bytes, session.device))
    except SandboxError as error:
        # Not an error: messages go through files then.
        return Refusal(error.found)
    return None


def _share(session: Session, request: Request) -> dict[str, Any]:
    """Open a larger arena for the next messages; the answer says why it cannot be opened."""
    refusal = _open_arena(session, request["arena"], lend_also)
    return {"unshared": refusal.reason if refusal else ""}


def _unshare(session: Session, request: Request) -> dict[str, Any]:
    """Close the larger arena."""
    return_to_first(session.scratch)
    return {}


def _load(session: Session, request: Request) -> dict[str, Any]:
    """Build the runner of a Program under a schedule and put it into a slot."""
    program = read_program(request["program"], request["payloads"])
    session.static = frozenset(request["static"])
    # On a CPU Inductor would compile its C++ headers in every child.
    if session.device.type == "cpu" and request["schedule"] != "eager":
        keep_headers()
    session.slots[request["slot"]] = build_runner(
        program, request["schedule"], session.device, static=session.static
    )
    return {}


def _read_source(session: Session, request: Request) -> dict[str, Any]:
    """Describe how to construct and call the module of a reference file; writes its example tensors
    to a file.
    """
    description, tensors = describe_reference(
        import_source(request["text"], session.scratch),
        request["entry"],
        session.device,
        int(request["seed"]),
    )
    return {**description, "layout": save_tensors(tensors, Path(request["path"]))}


def _load_source(session: Session, request: Request) -> dict[str, Any]:
    """Put the module of a source text into a slot. Answers name, dtype and shape of each tensor of
    its state dict after construction.
    """
    spec, mode = CallSpec.from_json(request["form"]), RunMode(**request["way"])
    source = import_source(request["text"], session.scratch)
    runner = ModuleRunner(source, spec, mode, session.device)
    # Parameters and buffers keep their values from call to call; only the inputs rotate.
    session.static = frozenset(range(len(spec.names)))
    session.slots[request["slot"]] = runner
    # Before any call: a module whose state dict changes at its first call is no drop-in
    # replacement.
    state = runner.make_instance().state_dict()
    return {
        "state": [
            [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
            for name, value in state.items()
        ]
    }


def _put(session: Session, request: Request) -> dict[str, Any]:
    """Read an input set from a file. `base`: the earlier set that supplies the missing tensors."""
    path = Path(request["path"])
    tensors = load_tensors(request["layout"], path, session.device)
    # The scratch folder may be in memory, which two copies would fill.
    path.unlink(missing_ok=True)
    base: Sequence[torch.Tensor | None] = (
        session.sets[request["base"]] if request["base"] else tensors
    )
    session.sets[request["name"]] = [
        require_tensor(new if new is not None else old)
        for new, old in zip(tensors, base, strict=True)
    ]
    return {}


def _drop(session: Session, request: Request) -> dict[str, Any]:
    """Free input sets and, without `held` in the request, the held outputs."""
    size = sum(
        _count_bytes(tensor) for name in request["names"] for tensor in session.sets.get(name, ())
    )
    for name in request["names"]:
        session.sets.pop(name, None)
    dropped = set(request["names"])
    # Rings and sides keep the tensors of their sets alive.
    if any(not dropped.isdisjoint(names) for names in session.rings):
        session.rings = {
            names: ring for names, ring in session.rings.items() if dropped.isdisjoint(names)
        }
        session.sides = None
    if not request.get("held"):
        session.held.clear()
        session.copied = None
    # The judge takes memory for larger messages from the driver, not from this allocator.
    make_room(session.device, size)
    return {}


def _clear(session: Session, request: Request) -> dict[str, Any]:
    """Reset the session to that of a new process; compiled code stays.

    `kept`: GPU memory stays in PyTorch's allocator too, overwritten.
    """
    empty = Session(session.device, session.scratch)
    for attribute in fields(Session):
        setattr(session, attribute.name, getattr(empty, attribute.name))
    gc.collect()
    if session.device.type == "cuda":
        if request.get("kept"):
            # Overwritten: the next candidate could return a result that it finds there. Kept:
            # beside other processes on an H200 a new tensor of 32 MiB took 20 ms, most of it
            # waiting for a turn on the GPU (0.05 ms alone).
            memory_handlers.fill_free_blocks(_ERASED_BYTE, session.device, everywhere=True)
        else:
            torch.cuda.empty_cache()
    return {}


def _run(session: Session, request: Request) -> dict[str, Any]:
    """Call a slot on an input set; writes the outputs to a file and answers their properties.

    `hold`: keep the outputs alive, for `reread`.
    """
    inputs = session.sets[request["inputs"]]
    started = time.perf_counter()
    with torch.no_grad():
        outputs = session.slots[request["slot"]](inputs)
    # Before anything else touches them: a lazy output would be computed by the first operation.
    refuse_lazy(outputs)
    synchronise(session.device)
    # With the wait for the device. A first call may compile, or do work that later calls skip.
    session.first_us.setdefault(request["slot"], (time.perf_counter() - started) * 1e6)
    layout = save_raw_tensors(outputs, Path(request["path"]))
    # Compared with the outputs of earlier calls, before these are held themselves.
    facts = describe(outputs, inputs, session.held)
    if request.get("hold"):
        session.held.append(list(outputs))
    size = sum(map(_count_bytes, outputs))
    # Freed first, so that the allocator can return their memory.
    del outputs
    make_room(session.device, size)
    return {
        "layout": layout,
        "facts": facts,
        "tree": getattr(session.slots[request["slot"]], "tree", ""),
    }


def _compile_ahead(session: Session, request: Request) -> dict[str, Any]:
    """Compile the kernels that a call of a slot launches.

    `like`: pairs of a shape and the name of a dtype, of the inputs.
    """
    like = [(shape, getattr(torch, dtype)) for shape, dtype in request["like"]]
    compile_ahead(session.slots[request["slot"]], like, session.device)
    return {}


def _reread(session: Session, request: Request) -> dict[str, Any]:
    """Write out held outputs number `index` as they are now, or the tensors at `positions` of the
    input set `name`: a later call may have overwritten them.
    """
    path = Path(request["path"])
    if "name" not in request:
        return {"layout": save_raw_tensors(session.held[int(request["index"])], path)}
    tensors = session.sets[request["name"]]
    runner = session.slots.get(request.get("slot", ""))
    if isinstance(runner, ModuleRunner) and runner.holds(tensors[: (count := len(runner.state()))]):
        # The module has copies of the parameters, and a call must not write to those either.
        tensors = [*runner.state(), *tensors[count:]]
    return {"layout": save_raw_tensors([tensors[index] for index in request["positions"]], path)}


def _read_copied(session: Session, request: Request) -> dict[str, Any]:
    """Write out the outputs of one call of the last timed batch as they were when its clock stopped;
    answers the call's number.
    """
    if session.copied is None:
        raise SandboxError("timing", "no timed batch has kept its outputs")
    number, outputs = session.copied
    return {"index": number, "layout": save_raw_tensors(outputs, Path(request["path"]))}


def _build(session: Session, request: Request) -> dict[str, Any]:
    """Compile one proposal into a Program; answers its JSON, and its payloads in a file."""
    # Imports Triton, so only in a child that compiles.
    from torch_cudal1 import kernels

    program = read_program(request["program"], request["payloads"])
    built = kernels.build(program, kernels.Proposal.from_json(request["proposal"]), request["sm"])
    return {"program": built.to_json(), "payloads": write_payloads(built, Path(request["path"]))}


Handler: TypeAlias = Callable[[Session, Request], dict[str, Any]]
HANDLERS: dict[str, Handler] = {
    "hello": _answer_hello,
    "share": _share,
    "unshare": _unshare,
    "load": _load,
    "read_source": _read_source,
    "load_source": _load_source,
    "put": _put,
    "drop": _drop,
    "clear": _clear,
    "run": _run,
    "ahead": _compile_ahead,
    "reread": _reread,
    "copied": _read_copied,
    "build": _build,
    **timing_handlers.HANDLERS,
    **state_handlers.HANDLERS,
    **memory_handlers.HANDLERS,
    **guard_pages.HANDLERS,
    **int64_handlers.HANDLERS,
}


def main(fd: int, handlers: Mapping[str, Handler] = HANDLERS) -> None:
    """Serve requests on the inherited socket until the parent hangs up."""
    # A program that the candidate starts must not get the channel.
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    session = Session(torch.device("cpu"))
    while True:
        try:
            request = channel.receive()
        # The parent has closed the channel, or died.
        except EOFError:
            return
        answer = _answer_in_order(session, request, handlers)
        channel.send({"nonce": request.get("nonce"), **answer})


def _answer_in_order(
    session: Session, request: Request, handlers: Mapping[str, Handler]
) -> dict[str, Any]:
    """Serve the requests of `due`, then `request`; the answer to the last, or the first failure."""
    for due in request.get("due", ()):
        answer = _answer(session, due, handlers)
        if "error" in answer:
            return {**answer, "failed": due["verb"]}
    return _answer(session, request, handlers)


def _answer(session: Session, request: Request, handlers: Mapping[str, Handler]) -> dict[str, Any]:
    try:
        return handlers[request["verb"]](session, request)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return {"error": f"out of memory: {error}", "detector": "resource"}
    except PermissionError as error:
        # The sandbox refused something.
        return {"error": f"PermissionError: {error}", "detector": "isolation"}
    except Cudal1Error as error:
        # `lost`: after a sticky CUDA error this process cannot serve another candidate.
        detector = {"detector": error.detector} if isinstance(error, RefusedOutput) else {}
        return {"error": f"{type(error).__name__}: {error}", "lost": is_sticky(error), **detector}
    # A candidate may raise anything. It becomes its reason, and this process is disposable.
    except Exception as error:  # noqa: BLE001
        # torch's CPU allocator raises RuntimeError where memory runs out.
        detector = {"detector": "resource"} if "allocate memory" in str(error) else {}
        return {"error": f"{type(error).__name__}: {error}", "lost": is_sticky(error), **detector}


def _count_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


if __name__ == "__main__":
    main(int(sys.argv[1]))
