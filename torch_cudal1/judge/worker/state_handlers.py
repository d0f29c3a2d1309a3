"""What a child does with what sits in its slots, besides calling it: the verbs of the detectors of
state, shape and concurrency.

Each verb does something that a real program does to a model between or during calls. It compares
nothing; what came out is read by the parent, which decides. Streams, graphs and their pools are
made here, never by a candidate.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.reference.compare import same_bits
from torch_cudal1.judge.wire.channel import load_tensors, save_tensors, storage_extent
from torch_cudal1.judge.wire.properties import describe
from torch_cudal1.judge.worker.modules import ModuleRunner

if TYPE_CHECKING:
    from torch_cudal1.judge.worker.session import Session

__all__ = ["VERBS"]

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
Outputs: TypeAlias = list[torch.Tensor | None]
_GARBAGE = 12_345.0
_SPIN_CYCLES = 20_000_000  # about 10 ms on a GPU at 2 GHz: far longer than a launch takes


def _rewrite(session: Session, request: Request) -> Answer:
    """New values in the memory of a set (null in the layout: as they are), by a way that no version
    counter sees.
    """
    given = load_tensors(request["layout"], Path(request["path"]), session.device)
    for old, new in zip(session.sets[request["name"]], given, strict=True):
        if new is not None:
            _flat(old.data).copy_(_flat(new))
    return {}


def _arrange(session: Session, request: Request) -> Answer:
    """The tensors of a set placed as a caller may place them: one element into their storage, or
    one object in several places.
    """
    tensors = session.sets[request["name"]]
    for index in request["offset"]:
        old = tensors[index]
        storage = torch.empty(
            storage_extent(old.shape, old.stride()) + 1, dtype=old.dtype, device=old.device
        )
        moved = storage.as_strided(old.shape, old.stride(), 1)
        storage[1:].copy_(_flat(old))
        tensors[index] = moved
    for source, target in request["same"]:
        tensors[target] = tensors[source]
    return {}


def _scribble(session: Session, request: Request) -> Answer:
    """Overwrite the outputs that the caller holds, except those that are views of inputs; tells how
    many.
    """
    inputs = [tensor for tensors in session.sets.values() for tensor in tensors]
    count = 0
    for outputs in session.held:
        for out, facts in zip(outputs, describe(outputs, inputs), strict=True):
            if out is not None and facts is not None and not facts["inputs"] and out.numel():
                out.data.fill_(
                    _GARBAGE if out.dtype.is_floating_point or out.dtype.is_complex else 1
                )
                count += 1
    return {"count": count}


def _soak(session: Session, request: Request) -> Answer:
    """Call a slot many times, the sets in turn, at most `budget_s` long; tells how often."""
    run, sets = session.slots[request["slot"]], [session.sets[name] for name in request["sets"]]
    ends, calls = time.monotonic() + float(request["budget_s"]), 0
    with torch.no_grad():
        while calls < int(request["calls"]) and time.monotonic() < ends:
            run(sets[calls % len(sets)])
            calls += 1
    synchronise(session.device)
    return {"calls": calls}


def _state(session: Session, request: Request) -> Answer:
    """Name, dtype and shape of what the living instance's state dict holds now, and whether it is
    in training mode.
    """
    instance = _module(session, request).instance
    state = instance.state_dict()
    told = [
        [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
        for name, value in state.items()
    ]
    return {"state": told, "training": instance.training}


def _update(session: Session, request: Request) -> Answer:
    """Bring the living instance to the parameters and buffers of a set, in one of the ways a
    program has.
    """
    runner = _module(session, request)
    given = session.sets[request["name"]]
    state = runner.state()
    values = given[: len(state)]
    _WAYS[request["way"]](runner, state, values)
    runner.adopt(values)
    return {}


def _transform(session: Session, request: Request) -> Answer:
    """Put a copy in the place of the living instance: through deepcopy or pickle."""
    runner = _module(session, request)
    old = runner.instance
    if request["how"] == "deepcopy":
        runner.replace(copy.deepcopy(old))
    else:
        runner.replace(pickle.loads(pickle.dumps(old)))  # noqa: S301  its own bytes, in its own process
    return {}


def _reenter(session: Session, request: Request) -> Answer:
    """Call slots from several threads at once, on CUDA each on a stream of its own; every result
    that differs from the thread's others is written out: `found` holds [thread, number of outputs]
    in the order of the file.
    """
    jobs = [(session.slots[slot], session.sets[name]) for slot, name in request["jobs"]]
    calls = max(1, int(request["calls"]) // len(jobs))
    for run, inputs in jobs:  # what a first call sets up is no part of this
        run(inputs)
    synchronise(session.device)
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(
            pool.map(lambda job: _called_alone(job[0], job[1], calls, session.device), jobs)
        )
    flat = [out for results in found for outputs in results for out in outputs]
    told = [[thread, len(outputs)] for thread, results in enumerate(found) for outputs in results]
    return {
        "layout": save_tensors(flat, Path(request["path"])),
        "found": told,
        "calls": calls * len(jobs),
    }


def _called_alone(
    run: Callable[..., Outputs], inputs: Sequence[torch.Tensor], calls: int, device: torch.device
) -> list[Outputs]:
    """The results of one thread's calls, equal ones once; at most eight, which is enough to be
    wrong.
    """
    different: list[Outputs] = []
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for _ in range(calls):
        with torch.no_grad(), torch.cuda.stream(stream):
            outputs = run(inputs)
        if stream is not None:
            stream.synchronize()
        if len(different) < 8 and not any(
            all(map(same_bits, outputs, known)) for known in different
        ):
            different.append([None if out is None else out.clone() for out in outputs])
    return different


def _side_stream(session: Session, request: Request) -> Answer:
    """On a stream that does not wait for the default one: a slow producer writes the inputs, the
    slot is called, and the consumer overwrites the inputs at once, all queued in order.
    """
    run, wanted = session.slots[request["slot"]], session.sets[request["inputs"]]
    moving = [index for index in range(len(wanted)) if index not in session.static]
    place = list(wanted)
    for index in moving:
        place[index] = _copy(wanted[index])
    with torch.no_grad():
        run(place)  # compilation and first-call work are no part of this
        garbage = [torch.zeros_like(_flat(place[index])) for index in moving]
        for index, waste in zip(moving, garbage, strict=True):
            _flat(place[index]).copy_(waste)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream(session.device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_SPIN_CYCLES)
            for index in moving:
                _flat(place[index]).copy_(_flat(wanted[index]))
            outputs = run(place)
            for index, waste in zip(moving, garbage, strict=True):
                _flat(place[index]).copy_(waste)
            outputs = [out if out is None else _copy(out) for out in outputs]
        stream.synchronize()
    return {
        "layout": save_tensors(outputs, Path(request["path"])),
        "facts": describe(outputs, wanted),
    }


def _capture(session: Session, request: Request) -> Answer:
    """Capture one call in the caller's own CUDA graph and replay it on the data of each set, the
    allocator emptied in between.
    """
    run, sets = session.slots[request["slot"]], [session.sets[name] for name in request["sets"]]
    moving = [index for index in range(len(sets[0])) if index not in session.static]
    place = [_copy(tensor) if index in moving else tensor for index, tensor in enumerate(sets[0])]
    with torch.no_grad():
        side = torch.cuda.Stream(session.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run(place)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(place)
    found: Outputs = []
    for tensors in sets:
        for index in moving:
            _flat(place[index]).copy_(_flat(tensors[index]))
        torch.cuda.empty_cache()
        graph.replay()
        torch.cuda.synchronize()
        found += [out if out is None else _copy(out) for out in results]
    return {"layout": save_tensors(found, Path(request["path"]))}


def _module(session: Session, request: Request) -> ModuleRunner:
    runner = session.slots[request["slot"]]
    if not isinstance(runner, ModuleRunner):
        raise SandboxError(str(request["verb"]), "no module is in this slot, a Program is")
    return runner


def _written(write: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[..., None]:
    def update(
        runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        with torch.no_grad():
            for old, new in zip(state, values, strict=True):
                write(old, new)

    return update


def _repointed(old: torch.Tensor, new: torch.Tensor) -> None:
    old.data = _copy(new)


def _in_inference(
    runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    with torch.inference_mode():
        for old, new in zip(state, values, strict=True):
            old.copy_(new)


def _loaded(assign: bool) -> Callable[..., None]:
    def update(
        runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        given = dict(zip(runner.names, map(_copy, values), strict=True))
        runner.instance.load_state_dict(given, strict=True, assign=assign)

    return update


def _stepped(**kind: bool) -> Callable[..., None]:
    """One step of SGD at a learning rate of 1 along old - new: it lands on old - (old - new).
    Buffers are written directly.
    """

    def update(
        runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        steered = []
        for old, new in zip(state, values, strict=True):
            if isinstance(old, torch.nn.Parameter) and old.dtype.is_floating_point:
                old.grad = old.detach() - new
                steered.append(old)
            else:
                old.data.copy_(new)
        if steered:
            torch.optim.SGD(steered, lr=1.0, **kind).step()
        for parameter in steered:
            parameter.grad = None

    return update


def _swapped(
    runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """A new Parameter object under the old name; buffers likewise."""
    for name, old, new in zip(runner.names, state, values, strict=True):
        path, _, last = name.rpartition(".")
        fresh = _copy(new)
        kept = (
            torch.nn.Parameter(fresh, old.requires_grad)
            if isinstance(old, torch.nn.Parameter)
            else fresh
        )
        setattr(runner.instance.get_submodule(path), last, kept)


_WAYS: dict[str, Callable[[ModuleRunner, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]] = {
    "copy": _written(lambda old, new: old.copy_(new)),
    "data": _written(_repointed),
    "data_copy": _written(lambda old, new: old.data.copy_(new)),
    "load": _loaded(assign=False),
    "assign": _loaded(assign=True),
    "sgd": _stepped(foreach=False),
    "foreach": _stepped(foreach=True),
    "fused": _stepped(fused=True),
    "swap": _swapped,
    "inference": _in_inference,
}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The storage a tensor spans, overlapping elements once."""
    return tensor.as_strided(
        (storage_extent(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset()
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return _flat(tensor.detach()).clone().as_strided(tensor.shape, tensor.stride())


VERBS: dict[str, Callable[[Session, Request], Answer]] = {
    "rewrite": _rewrite,
    "arrange": _arrange,
    "scribble": _scribble,
    "soak": _soak,
    "state": _state,
    "update": _update,
    "transform": _transform,
    "reenter": _reenter,
    "side_stream": _side_stream,
    "capture": _capture,
}
