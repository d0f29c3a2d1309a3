"""The child's loop, `python -m torch_cudal1.judge.worker FD`: it loads Programs, turns buffers into buffers and reports raw facts.

It holds no reference result, no tolerance and no verdict: the parent compares and decides. Its standard output means nothing.
Whatever goes wrong in a request is answered as an error, except what ends the process.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from torch_cudal1.errors import Cudal1Error
from torch_cudal1.judge import rights, timing
from torch_cudal1.judge.channel import Channel, load_tensors, save_tensors, storage_extent
from torch_cudal1.judge.properties import describe
from torch_cudal1.judge.transport import present, read_program, write_payloads
from torch_cudal1.program.execute import Runner
from torch_cudal1.program.schedule import build as build_runner

__all__ = ["VERBS", "main"]

Request: TypeAlias = Mapping[str, Any]
_RING_BYTES = 512 << 20
_RING_SETS = 8


@dataclass
class Session:
    """What one child holds: callables in slots, input sets by name (and the files they came from), outputs kept alive."""

    device: torch.device
    scratch: Path = Path()
    slots: dict[str, Runner] = field(default_factory=dict)
    static: frozenset[int] = frozenset()
    sets: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    sources: dict[str, tuple[list[Any], Path]] = field(default_factory=dict)
    held: list[list[torch.Tensor | None]] = field(default_factory=list)


def _hello(session: Session, request: Request) -> dict[str, Any]:
    _die_with(int(request["parent"]))
    _limit(int(request["memory_bytes"]), int(request["file_bytes"]))
    session.device = torch.device(request["device"])
    session.scratch = Path(request["scratch"])
    torch.set_num_threads(int(request["threads"]))
    rights.apply(request["flags"])
    return {"pid": os.getpid(), "torch": torch.__version__}


def _load(session: Session, request: Request) -> dict[str, Any]:
    """Make the callable of a Program under a schedule and put it into a slot."""
    program = read_program(request["program"], request["payloads"])
    session.static = frozenset(request["static"])
    session.slots[request["slot"]] = build_runner(program, request["schedule"], session.device, static=session.static)
    return {}


def _put(session: Session, request: Request) -> dict[str, Any]:
    """Take an input set from a file; `base` names an earlier set that fills the places the file leaves out."""
    layout, path = request["layout"], Path(request["path"])
    given = load_tensors(layout, path, session.device)
    base: Sequence[torch.Tensor | None] = session.sets[request["base"]] if request["base"] else given
    session.sets[request["name"]] = [present(new if new is not None else old) for new, old in zip(given, base, strict=True)]
    session.sources[request["name"]] = (layout, path)
    return {}


def _drop(session: Session, request: Request) -> dict[str, Any]:
    """Forget input sets and held outputs."""
    for name in request["names"]:
        session.sets.pop(name, None)
        _, path = session.sources.pop(name, ([], session.scratch / "none"))
        path.unlink(missing_ok=True)
    session.held.clear()
    return {}


def _run(session: Session, request: Request) -> dict[str, Any]:
    """Call a slot on an input set: outputs to a file, with their properties. `hold` keeps the outputs alive for `reread`."""
    inputs = session.sets[request["inputs"]]
    with torch.no_grad():
        outputs = session.slots[request["slot"]](inputs)
    timing.synchronise(session.device)
    facts = describe(outputs, inputs, session.held)
    if request.get("hold"):
        session.held.append(list(outputs))
    return {"layout": save_tensors(outputs, Path(request["path"])), "facts": facts}


def _reread(session: Session, request: Request) -> dict[str, Any]:
    """Write held outputs number `index` out again, as they are now."""
    return {"layout": save_tensors(session.held[int(request["index"])], Path(request["path"]))}


def _unchanged(session: Session, request: Request) -> dict[str, Any]:
    """Positions of the inputs of a set whose bytes are no longer those of the file they came from."""
    layout, path = session.sources[request["name"]]
    before = load_tensors(layout, path, session.device)
    now = session.sets[request["name"]]
    return {"changed": [i for i, old in enumerate(before) if old is not None and not _same_bytes(old, now[i])]}


def _time(session: Session, request: Request) -> dict[str, Any]:
    """Paired samples of two slots: microseconds per call, baseline first."""
    ring = _ring(session, request["sets"])
    run_a, run_b = (_cycle(session.slots[request[side]], ring) for side in ("a", "b"))
    pairs = timing.sample_pairs(run_a, run_b, session.device, budget_s=float(request["budget_s"]))
    device_us = [timing.device_time_us(run, session.device) for run in (run_a, run_b)]
    return {"pairs": pairs, "device_us": device_us}


def _bench(session: Session, request: Request) -> dict[str, Any]:
    """Interleaved samples of several slots: microseconds per call."""
    ring = _ring(session, request["sets"])
    runs = {slot: _cycle(session.slots[slot], ring) for slot in request["slots"]}
    return {"samples": timing.interleave(runs, session.device, budget_s=float(request["budget_s"]))}


def _build(session: Session, request: Request) -> dict[str, Any]:
    """Compile one proposal into a Program: its JSON, and its payloads in a file."""
    from torch_cudal1 import kernels  # imports Triton: only a child that compiles pays for it

    program = read_program(request["program"], request["payloads"])
    built = kernels.build(program, kernels.Proposal.from_json(request["proposal"]), request["sm"])
    return {"program": built.to_json(), "payloads": write_payloads(built, Path(request["path"]))}


VERBS: dict[str, Callable[[Session, Request], dict[str, Any]]] = {
    "hello": _hello,
    "load": _load,
    "put": _put,
    "drop": _drop,
    "run": _run,
    "reread": _reread,
    "unchanged": _unchanged,
    "time": _time,
    "bench": _bench,
    "build": _build,
}


def main(fd: int) -> None:
    """Serve requests on the inherited socket until the parent hangs up."""
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    session = Session(torch.device("cpu"))
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        answer = _serve(session, request)
        channel.send({"nonce": request.get("nonce"), **answer})


def _serve(session: Session, request: Request) -> dict[str, Any]:
    try:
        return VERBS[request["verb"]](session, request)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return {"error": f"out of memory: {error}", "detector": "resource"}
    except Cudal1Error as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001  whatever a candidate raises becomes its reason, and this process is disposable
        detector = {"detector": "resource"} if "allocate memory" in str(error) else {}  # torch's CPU allocator raises RuntimeError
        return {"error": f"{type(error).__name__}: {error}", **detector}


def _same_bytes(old: torch.Tensor, new: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        extent = storage_extent(tensor.shape, tensor.stride())
        return tensor.as_strided((extent,), (1,)).view(torch.uint8)

    return torch.equal(raw(old), raw(new))


def _ring(session: Session, names: Sequence[str]) -> list[list[torch.Tensor]]:
    """Input sets to call with in turn. Parameters and buffers are those of the first set, as in a model that stays the same."""
    sets = [session.sets[name] for name in names]
    first = sets[0]
    ring = [[first[i] if i in session.static else t for i, t in enumerate(inputs)] for inputs in sets]
    moving = sum(t.numel() * t.element_size() for i, t in enumerate(first) if i not in session.static)
    wanted = min(_RING_SETS, max(2, _RING_BYTES // max(1, moving)))
    while len(ring) < wanted:
        model = ring[len(ring) % len(sets)]
        ring.append([t if i in session.static else _copy(t) for i, t in enumerate(model)])
    return ring


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    extent = storage_extent(tensor.shape, tensor.stride())
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _cycle(runner: Runner, ring: Sequence[Sequence[torch.Tensor]]) -> Callable[[], object]:
    position = random.randrange(len(ring))

    def run() -> object:
        nonlocal position
        position = (position + 1) % len(ring)
        return runner(ring[position])

    return run


def _die_with(parent: int) -> None:
    """Ask Linux for SIGKILL when the parent dies (prctl PR_SET_PDEATHSIG = 1); other systems rely on the closed socket."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the judge is gone")


def _limit(memory_bytes: int, file_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    if memory_bytes:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()  # torch maps gigabytes it never uses
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes,) * 2)


if __name__ == "__main__":
    main(int(sys.argv[1]))
