"""The child's loop, `python -m torch_cudal1.judge.worker.session FD`: it loads Programs, turns
buffers into buffers and reports raw facts.

It holds no reference result, no tolerance and no verdict: the parent compares and decides. Its
standard output means nothing. Whatever goes wrong in a request is answered as an error, except what
ends the process.
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
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.device.gpu_memory import make_room
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.benchmark.rotating_inputs import Ring, Turns
from torch_cudal1.judge.wire import precision_rights
from torch_cudal1.judge.wire.arena import Arena, lend, lend_also, open_arena, return_to_first
from torch_cudal1.judge.wire.channel import (
    Channel,
    in_arena,
    load_tensors,
    save_tensors,
    storage_extent,
)
from torch_cudal1.judge.wire.properties import describe
from torch_cudal1.judge.wire.transport import present, read_program, write_payloads
from torch_cudal1.judge.worker import (
    guard_pages,
    int64_handlers,
    memory_handlers,
    state_handlers,
    timing_handlers,
)
from torch_cudal1.judge.worker.global_state import surroundings
from torch_cudal1.judge.worker.headers import keep_headers
from torch_cudal1.judge.worker.kernel_compile import compile_ahead
from torch_cudal1.judge.worker.lockdown import tighten
from torch_cudal1.judge.worker.modules import CallForm, ModuleRunner, Way, described, imported
from torch_cudal1.judge.worker.raw_copy import RefusedOutput, raw_tensors, refuse_lazy
from torch_cudal1.runtime.schedule import build as build_runner

__all__ = ["VERBS", "Request", "Session", "Verb", "main"]

Request: TypeAlias = Mapping[str, Any]
_NOTHING_COMPUTED = 0xFF  # NaN in every floating type
_COPIED_BYTES = (
    1 << 30
)  # of a set larger than that no copy is kept: it is shown again where it must be


@dataclass
class Session:
    """What one child holds: callables in slots, input sets by name (and the files they came from),
    outputs kept alive.
    """

    device: torch.device
    scratch: Path = Path()
    slots: dict[str, Runner] = field(default_factory=dict)
    static: frozenset[int] = frozenset()
    sets: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    sources: dict[str, tuple[list[Any], Path]] = field(default_factory=dict)
    copies: dict[str, list[torch.Tensor | None]] = field(
        default_factory=dict
    )  # of whole sets that came without a file
    held: list[list[torch.Tensor | None]] = field(default_factory=list)
    rings: dict[tuple[str, ...], Ring] = field(default_factory=dict)
    sides: tuple[Turns, Turns] | None = None
    first_us: dict[str, float] = field(default_factory=dict)  # of each slot's first call
    host_us: dict[str, float] = field(
        default_factory=dict
    )  # what queueing a call of a slot took last

    def ring(self, request: Request) -> Ring:
        """The ring of the request's sets, turned as it asks."""
        names = tuple(request["sets"])
        if names not in self.rings:
            self.rings[names] = Ring([self.sets[name] for name in names], self.static)
        self.rings[names].turn(int(request.get("shift", 0)))
        return self.rings[names]

    def warm_sides(self) -> tuple[Turns, Turns]:
        """What `warm` took. Raises SandboxError before it."""
        if self.sides is None:
            raise SandboxError("timing", "nothing was warmed; expected the verb `warm` first")
        return self.sides


def _hello(session: Session, request: Request) -> dict[str, Any]:
    session.device = torch.device(request["device"])
    session.scratch = Path(request["scratch"])
    torch.set_num_threads(int(request["threads"]))
    precision_rights.apply(request["flags"])
    tighten(request, session.device)
    unshared = _shared(session, request.get("arena"), lend)
    gc.collect()
    gc.freeze()  # what was imported is never garbage: later collections need not look at it
    return {
        "pid": os.getpid(),
        "torch": torch.__version__,
        "unshared": unshared,
        "surroundings": surroundings(session.device),
    }


def _shared(
    session: Session, arena: Sequence[Any] | None, use: Callable[[Path, Arena], None]
) -> str:
    """Open the memory that the judge shares, if it does; why that cannot be done, "" if it is."""
    if arena is None:
        return "none was given"
    try:
        use(session.scratch, open_arena(str(arena[0]), int(arena[1]), session.device))
    except SandboxError as error:
        return error.found
    return ""


def _share(session: Session, request: Request) -> dict[str, Any]:
    """Take larger memory for the next messages; why that cannot be done, "" if it is."""
    return {"unshared": _shared(session, request["arena"], lend_also)}


def _unshare(session: Session, request: Request) -> dict[str, Any]:
    """Let go of it."""
    return_to_first(session.scratch)
    return {}


def _load(session: Session, request: Request) -> dict[str, Any]:
    """Make the callable of a Program under a schedule and put it into a slot."""
    program = read_program(request["program"], request["payloads"])
    session.static = frozenset(request["static"])
    if session.device.type == "cpu" and request["schedule"] != "eager":
        keep_headers()
    session.slots[request["slot"]] = build_runner(
        program, request["schedule"], session.device, static=session.static
    )
    return {}


def _read_source(session: Session, request: Request) -> dict[str, Any]:
    """What a reference file says of itself: how to make and call its module; its example tensors go
    to a file.
    """
    told, tensors = described(
        imported(request["text"], session.scratch),
        request["entry"],
        session.device,
        int(request["seed"]),
    )
    return {**told, "layout": save_tensors(tensors, Path(request["path"]))}


def _load_source(session: Session, request: Request) -> dict[str, Any]:
    """Make a module from a source text and put it into a slot: the names, dtypes and shapes of its
    state, as it was constructed.
    """
    form, way = CallForm.from_json(request["form"]), Way(**request["way"])
    runner = ModuleRunner(imported(request["text"], session.scratch), form, way, session.device)
    session.static = frozenset(range(len(form.names)))
    session.slots[request["slot"]] = runner
    state = runner.fresh().state_dict()
    return {
        "state": [
            [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
            for name, value in state.items()
        ]
    }


def _put(session: Session, request: Request) -> dict[str, Any]:
    """Take an input set from a file; `base` names an earlier set that fills the places the file
    leaves out.
    """
    layout, path = request["layout"], Path(request["path"])
    given = load_tensors(layout, path, session.device)
    base: Sequence[torch.Tensor | None] = (
        session.sets[request["base"]] if request["base"] else given
    )
    session.sets[request["name"]] = [
        present(new if new is not None else old) for new, old in zip(given, base, strict=True)
    ]
    session.sources[request["name"]] = (layout, path)
    if in_arena(layout) and not request["base"] and sum(map(_bytes_of, given)) <= _COPIED_BYTES:
        session.copies[request["name"]] = load_tensors(layout, path, session.device)
    return {}


def _drop(session: Session, request: Request) -> dict[str, Any]:
    """Forget input sets and, unless told to keep them, held outputs."""
    size = sum(
        _bytes_of(tensor) for name in request["names"] for tensor in session.sets.get(name, ())
    )
    for name in request["names"]:
        session.sets.pop(name, None)
        session.copies.pop(name, None)
        _, path = session.sources.pop(name, ([], session.scratch / "none"))
        path.unlink(missing_ok=True)
    gone = set(request["names"])
    if any(not gone.isdisjoint(names) for names in session.rings):
        session.rings = {
            names: ring for names, ring in session.rings.items() if gone.isdisjoint(names)
        }
        session.sides = None
    if not request.get("held"):
        session.held.clear()
    make_room(session.device, size)
    return {}


def _clear(session: Session, request: Request) -> dict[str, Any]:
    """Forget everything that was loaded, so that the next question meets the process as a new one;
    what was compiled stays.

    `kept`: so does memory of a GPU, for which the driver takes 20 ms a tensor of 32 MiB when it is
    asked again, but with nothing of what was computed in it.
    """
    for _, path in session.sources.values():
        path.unlink(missing_ok=True)
    fresh = Session(session.device, session.scratch)
    for item in fields(Session):
        setattr(session, item.name, getattr(fresh, item.name))
    gc.collect()
    if session.device.type == "cuda":
        if request.get("kept"):
            memory_handlers.fill_free_blocks(_NOTHING_COMPUTED, session.device, everywhere=True)
        else:
            torch.cuda.empty_cache()
    return {}


def _run(session: Session, request: Request) -> dict[str, Any]:
    """Call a slot on an input set: outputs to a file, with their properties. `hold` keeps the
    outputs alive for `reread`.
    """
    inputs = session.sets[request["inputs"]]
    started = time.perf_counter()
    with torch.no_grad():
        outputs = session.slots[request["slot"]](inputs)
    refuse_lazy(outputs)
    synchronise(session.device)
    session.first_us.setdefault(request["slot"], (time.perf_counter() - started) * 1e6)
    layout = raw_tensors(outputs, Path(request["path"]))
    facts = describe(outputs, inputs, session.held)
    if request.get("hold"):
        session.held.append(list(outputs))
    size = sum(map(_bytes_of, outputs))
    del outputs
    make_room(session.device, size)
    return {
        "layout": layout,
        "facts": facts,
        "tree": getattr(session.slots[request["slot"]], "tree", ""),
    }


def _ahead(session: Session, request: Request) -> dict[str, Any]:
    """Compile what a call of a slot launches, on made-up tensors of `like`: pairs of a shape and
    the name of a dtype.
    """
    like = [(shape, getattr(torch, dtype)) for shape, dtype in request["like"]]
    compile_ahead(session.slots[request["slot"]], like, session.device)
    return {}


def _reread(session: Session, request: Request) -> dict[str, Any]:
    """Write held outputs number `index` out again, as they are now."""
    return {"layout": raw_tensors(session.held[int(request["index"])], Path(request["path"]))}


def _unchanged(session: Session, request: Request) -> dict[str, Any]:
    """Positions of the inputs of a set whose bytes are no longer those that came; None where they
    must be shown again for that.
    """
    before = session.copies.get(request["name"])
    if before is None:
        layout, path = session.sources[request["name"]]
        if in_arena(layout):
            if "layout" not in request:
                return {"changed": None}
            layout, path = request["layout"], Path(request["path"])
        before = load_tensors(layout, path, session.device)
    now = session.sets[request["name"]]
    runner = session.slots.get(request.get("slot", ""))
    if isinstance(runner, ModuleRunner) and runner.holds(now[: (count := len(runner.state()))]):
        now = [
            *runner.state(),
            *now[count:],
        ]  # the module holds copies of the parameters: those must not have changed either
    return {
        "changed": [
            i for i, old in enumerate(before) if old is not None and not _same_bytes(old, now[i])
        ]
    }


def _build(session: Session, request: Request) -> dict[str, Any]:
    """Compile one proposal into a Program: its JSON, and its payloads in a file."""
    from torch_cudal1 import kernels  # imports Triton: only a child that compiles pays for it

    program = read_program(request["program"], request["payloads"])
    built = kernels.build(program, kernels.Proposal.from_json(request["proposal"]), request["sm"])
    return {"program": built.to_json(), "payloads": write_payloads(built, Path(request["path"]))}


Verb: TypeAlias = Callable[[Session, Request], dict[str, Any]]
VERBS: dict[str, Verb] = {
    "hello": _hello,
    "share": _share,
    "unshare": _unshare,
    "load": _load,
    "read_source": _read_source,
    "load_source": _load_source,
    "put": _put,
    "drop": _drop,
    "clear": _clear,
    "run": _run,
    "ahead": _ahead,
    "reread": _reread,
    "unchanged": _unchanged,
    "build": _build,
    **timing_handlers.VERBS,
    **state_handlers.VERBS,
    **memory_handlers.VERBS,
    **guard_pages.VERBS,
    **int64_handlers.VERBS,
}


def main(fd: int, verbs: Mapping[str, Verb] = VERBS) -> None:
    """Serve requests on the inherited socket until the parent hangs up."""
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    session = Session(torch.device("cpu"))
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        answer = _serve(session, request, verbs)
        channel.send({"nonce": request.get("nonce"), **answer})


def _serve(session: Session, request: Request, verbs: Mapping[str, Verb]) -> dict[str, Any]:
    """The answer to a request, or to the first that fails of those which are due before it."""
    for due in request.get("due", ()):
        answer = _done(session, due, verbs)
        if "error" in answer:
            return {**answer, "failed": due["verb"]}
    return _done(session, request, verbs)


def _done(session: Session, request: Request, verbs: Mapping[str, Verb]) -> dict[str, Any]:
    try:
        return verbs[request["verb"]](session, request)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return {"error": f"out of memory: {error}", "detector": "resource"}
    except PermissionError as error:  # what the sandbox refuses
        return {"error": f"PermissionError: {error}", "detector": "isolation"}
    except Cudal1Error as error:
        named = {"detector": error.detector} if isinstance(error, RefusedOutput) else {}
        return {"error": f"{type(error).__name__}: {error}", "lost": is_sticky(error), **named}
    except Exception as error:  # noqa: BLE001  whatever a candidate raises becomes its reason, and this process is disposable
        detector = (
            {"detector": "resource"} if "allocate memory" in str(error) else {}
        )  # torch's CPU allocator raises RuntimeError
        return {"error": f"{type(error).__name__}: {error}", "lost": is_sticky(error), **detector}


def _bytes_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def _same_bytes(old: torch.Tensor, new: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        extent = storage_extent(tensor.shape, tensor.stride())
        return tensor.as_strided((extent,), (1,)).view(torch.uint8)

    return torch.equal(raw(old), raw(new))


if __name__ == "__main__":
    main(int(sys.argv[1]))
