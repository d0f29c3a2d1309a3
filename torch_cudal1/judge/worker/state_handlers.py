"""RPC handlers of the checks of state, shape and concurrency.

Each does to a slot what a real program does to a model between or during calls: new values in old
memory, an update of the weights, several threads, a side stream, a CUDA graph. The parent compares
the results and decides. Streams, graphs and their pools are created here, never by a candidate.
"""

from __future__ import annotations

import copy
import pickle
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.wire.channel import load_tensors, save_tensors, storage_extent
from torch_cudal1.judge.wire.properties import describe
from torch_cudal1.judge.wire.tensor_bits import all_same_bits
from torch_cudal1.judge.worker.modules.module_runner import ModuleRunner

if TYPE_CHECKING:
    from torch_cudal1.judge.worker.session import Session

__all__ = ["HANDLERS"]

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
Outputs: TypeAlias = list[torch.Tensor | None]
_SCRIBBLE_VALUE = 12_345.0
# Bound before any candidate is imported.
_draw_below = secrets.randbelow
# A single wrong result is enough to reject.
_MAX_DISTINCT_RESULTS = 8
# About 10 ms on a GPU at 2 GHz: far longer than a launch takes.
_SPIN_CYCLES = 20_000_000


def _rewrite(session: Session, request: Request) -> Answer:
    """Write new values into the memory of an input set. A null in the layout skips its tensor."""
    values = load_tensors(request["layout"], Path(request["path"]), session.device)
    for old, new in zip(session.sets[request["name"]], values, strict=True):
        if new is not None:
            # Through .data, which leaves Tensor._version alone: a cache keyed by address and
            # version would serve the old result.
            _view_span(old.data).copy_(_view_span(new))
    return {}


def _arrange(session: Session, request: Request) -> Answer:
    """Place the tensors of an input set as a caller may: `offset`: one element into their storage;
    `same`: one object at two positions.
    """
    tensors = session.sets[request["name"]]
    for index in request["offset"]:
        old = tensors[index]
        # One element further: the address is then not aligned for vector loads.
        storage = torch.empty(
            storage_extent(old.shape, old.stride()) + 1, dtype=old.dtype, device=old.device
        )
        moved = storage.as_strided(old.shape, old.stride(), 1)
        storage[1:].copy_(_view_span(old))
        tensors[index] = moved
    for source, target in request["same"]:
        tensors[target] = tensors[source]
    return {}


def _scribble(session: Session, request: Request) -> Answer:
    """Overwrite the held outputs, except views of inputs. Answers their number."""
    inputs = [tensor for tensors in session.sets.values() for tensor in tensors]
    count = 0
    for outputs in session.held:
        for out, facts in zip(outputs, describe(outputs, inputs), strict=True):
            if out is not None and facts is not None and not facts["inputs"] and out.numel():
                # A candidate that returned a buffer which it keeps would compute or return this
                # value later.
                out.data.fill_(
                    _SCRIBBLE_VALUE if out.dtype.is_floating_point or out.dtype.is_complex else 1
                )
                count += 1
    return {"count": count}


def _soak(session: Session, request: Request) -> Answer:
    """Call a slot up to `calls` times on input sets in random order, for at most `budget_s` seconds
    or until `least` calls are made, which may take `least_s`. Hold the outputs while they fit into
    `held_bytes`.

    Writes to a file the distinct outputs for each input set, those that changed while they were
    held included; none that are larger than `held_bytes`. `found` in the answer: [number of the
    set, number of outputs] for each, in the order of the file.
    """
    run, sets = session.slots[request["slot"]], [session.sets[name] for name in request["sets"]]
    begin, most_bytes = time.monotonic(), int(request["held_bytes"])
    distinct = _DistinctOutputs(len(sets), most_bytes)
    recent: deque[tuple[int, Outputs]] = deque()
    held_bytes = calls = 0
    with torch.no_grad():
        while calls < int(request["calls"]):
            limit_s = request["least_s" if calls < int(request["least"]) else "budget_s"]
            if time.monotonic() - begin >= float(limit_s):
                break
            # A ring of buffers would otherwise give each of them the values that it has.
            number = _draw_below(len(sets))
            outputs = list(run(sets[number]))
            distinct.add(number, outputs)
            recent.append((number, outputs))
            held_bytes += _count_output_bytes(outputs)
            while held_bytes > most_bytes:
                held_bytes -= _count_output_bytes(recent.popleft()[1])
            calls += 1
    synchronise(session.device)
    for number, outputs in recent:
        distinct.add(number, outputs)
    flat = [out for _, outputs in distinct.entries for out in outputs]
    return {
        "calls": calls,
        "layout": save_tensors(flat, Path(request["path"])),
        "found": [[number, len(outputs)] for number, outputs in distinct.entries],
    }


class _DistinctOutputs:
    """Copies of the outputs of calls on a few input sets, equal bits once a set; of one set at most
    `most_bytes`.
    """

    def __init__(self, sets: int, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.entries: list[tuple[int, Outputs]] = []
        self._of_set: list[list[Outputs]] = [[] for _ in range(sets)]

    def add(self, number: int, outputs: Outputs) -> None:
        """Keep the outputs of a call on that set, unless they are known or many are kept."""
        same_set = self._of_set[number]
        most = _MAX_DISTINCT_RESULTS
        if size := _count_output_bytes(outputs):
            most = min(most, self._most_bytes // size)
        if len(same_set) < most and not any(all_same_bits(outputs, each) for each in same_set):
            # Cloned: a candidate may overwrite a buffer that it returned.
            same_set.append([None if out is None else out.clone() for out in outputs])
            self.entries.append((number, same_set[-1]))


def _count_output_bytes(outputs: Outputs) -> int:
    return sum(out.numel() * out.element_size() for out in outputs if out is not None)


def _read_state(session: Session, request: Request) -> Answer:
    """Name, dtype and shape of each entry of the state dict of the present instance, and whether it
    is in training mode.
    """
    instance = _find_module_runner(session, request).instance
    state = instance.state_dict()
    entries = [
        [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
        for name, value in state.items()
    ]
    return {"state": entries, "training": instance.training}


def _update(session: Session, request: Request) -> Answer:
    """Set the present instance to the parameters and buffers of a set, by one of `_UPDATES`."""
    runner = _find_module_runner(session, request)
    _restore_parameters(runner)
    state = runner.state()
    values = session.sets[request["name"]][: len(state)]
    _UPDATES[request["way"]](runner, state, values)
    # Otherwise the next call would construct a new instance, and no stale weight would show.
    runner.adopt(values)
    return {}


def _share_instance(session: Session, request: Request) -> Answer:
    """From now on a slot calls the module instance of the slot `of`, in its own way."""
    other = _find_module_runner(session, {"slot": request["of"]})
    _find_module_runner(session, request).share(other)
    return {}


def _transform(session: Session, request: Request) -> Answer:
    """Replace the present instance by a copy of it, made by deepcopy or pickle."""
    runner = _find_module_runner(session, request)
    old = runner.instance
    if request["how"] == "deepcopy":
        runner.replace(copy.deepcopy(old))
    else:
        # Its own bytes, in its own process.
        runner.replace(pickle.loads(pickle.dumps(old)))  # noqa: S301
    return {}


def _reenter(session: Session, request: Request) -> Answer:
    """Call slots from several threads at once; on CUDA each thread uses its own stream.

    Writes the distinct results of each thread to a file. `found` in the answer: [thread, number of
    outputs] for each result, in the order of the file.
    """
    jobs = [(session.slots[slot], session.sets[name]) for slot, name in request["jobs"]]
    calls = max(1, int(request["calls"]) // len(jobs))
    # Setting up in the first call from several threads is not tested here.
    for run, inputs in jobs:
        run(inputs)
    synchronise(session.device)
    # One thread for each job, so that all calls can overlap: scratch memory shared by calls would
    # be corrupted.
    with ThreadPoolExecutor(len(jobs)) as pool:
        results_by_thread = list(
            pool.map(lambda job: _collect_results(job[0], job[1], calls, session.device), jobs)
        )
    flat = [out for results in results_by_thread for outputs in results for out in outputs]
    counts = [
        [thread, len(outputs)]
        for thread, results in enumerate(results_by_thread)
        for outputs in results
    ]
    return {
        "layout": save_tensors(flat, Path(request["path"])),
        "found": counts,
        "calls": calls * len(jobs),
    }


def _collect_results(
    run: Callable[..., Outputs], inputs: Sequence[torch.Tensor], calls: int, device: torch.device
) -> list[Outputs]:
    """The distinct results of one thread's calls, at most `_MAX_DISTINCT_RESULTS`."""
    distinct = _DistinctOutputs(1, sys.maxsize)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    for _ in range(calls):
        with torch.no_grad(), torch.cuda.stream(stream):
            outputs = run(inputs)
        if stream is not None:
            stream.synchronize()
        # Thousands of results cannot be sent. Only results that equal another one bit for bit are
        # dropped, so the parent sees every value.
        distinct.add(0, outputs)
    return [outputs for _, outputs in distinct.entries]


def _run_on_side_stream(session: Session, request: Request) -> Answer:
    """Call a slot on a side stream: a slow producer writes the inputs, the slot is called, and a
    consumer overwrites the inputs at once, all queued in this order.
    """
    run, values = session.slots[request["slot"]], session.sets[request["inputs"]]
    moving = [index for index in range(len(values)) if index not in session.static]
    inputs = list(values)
    for index in moving:
        inputs[index] = _copy(values[index])
    with torch.no_grad():
        # Compilation and other work of a first call may synchronise, and would hide the fault.
        run(inputs)
        garbage = [torch.zeros_like(_view_span(inputs[index])) for index in moving]
        for index, waste in zip(moving, garbage, strict=True):
            _view_span(inputs[index]).copy_(waste)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream(session.device)
        with torch.cuda.stream(stream):
            # A kernel on another stream would read the inputs during this time, before they are
            # written.
            torch.cuda._sleep(_SPIN_CYCLES)
            for index in moving:
                _view_span(inputs[index]).copy_(_view_span(values[index]))
            outputs = run(inputs)
            for index, waste in zip(moving, garbage, strict=True):
                _view_span(inputs[index]).copy_(waste)
            # On the same stream: a kernel that still runs on another one has not written them yet.
            outputs = [out if out is None else _copy(out) for out in outputs]
        stream.synchronize()
    return {
        "layout": save_tensors(outputs, Path(request["path"])),
        "facts": describe(outputs, values),
    }


def _run_captured(session: Session, request: Request) -> Answer:
    """Capture one call in a CUDA graph, as a user would, and replay it on each input set."""
    run, sets = session.slots[request["slot"]], [session.sets[name] for name in request["sets"]]
    moving = [index for index in range(len(sets[0])) if index not in session.static]
    inputs = [_copy(tensor) if index in moving else tensor for index, tensor in enumerate(sets[0])]
    with torch.no_grad():
        # Warm-up on a side stream before a capture, as PyTorch's notes on CUDA graphs ask for.
        side = torch.cuda.Stream(session.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run(inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static_outputs = run(inputs)
    outputs: Outputs = []
    for tensors in sets:
        for index in moving:
            _view_span(inputs[index]).copy_(_view_span(tensors[index]))
        # Memory that the graph uses but does not own is unmapped now, and the replay fails.
        torch.cuda.empty_cache()
        graph.replay()
        torch.cuda.synchronize()
        # Copied: the next replay overwrites the static outputs.
        outputs += [out if out is None else _copy(out) for out in static_outputs]
    return {"layout": save_tensors(outputs, Path(request["path"]))}


def _find_module_runner(session: Session, request: Request) -> ModuleRunner:
    runner = session.slots[request["slot"]]
    if not isinstance(runner, ModuleRunner):
        raise SandboxError(str(request["verb"]), "no module is in this slot, a Program is")
    return runner


def _write_each(write: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[..., None]:
    def update(
        runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        with torch.no_grad():
            for old, new in zip(state, values, strict=True):
                write(old, new)

    return update


def _repoint(old: torch.Tensor, new: torch.Tensor) -> None:
    # Only the address changes; the Parameter object stays.
    old.data = _copy(new)


def _copy_in_inference_mode(
    runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    with torch.inference_mode():
        for old, new in zip(state, values, strict=True):
            old.copy_(new)


def _load_state(assign: bool) -> Callable[..., None]:
    def update(
        runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        # Copies: with assign=True the module keeps these tensors.
        entries = dict(zip(runner.names, map(_copy, values), strict=True))
        runner.instance.load_state_dict(entries, strict=True, assign=assign)

    return update


def _step_sgd(**options: bool) -> Callable[..., None]:
    """Update parameters by one step of SGD with a learning rate of 1 and the gradient old - new,
    which leads to new up to rounding. Buffers are written directly.
    """

    def update(
        runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        stepped = []
        for old, new in zip(state, values, strict=True):
            if isinstance(old, torch.nn.Parameter) and old.dtype.is_floating_point:
                old.grad = old.detach() - new
                stepped.append(old)
            else:
                old.data.copy_(new)
        if stepped:
            torch.optim.SGD(stepped, lr=1.0, **options).step()
        for parameter in stepped:
            parameter.grad = None

    return update


def _swap_parameters(
    runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """Put a new Parameter object under each name; buffers likewise."""
    for name, old, new in zip(runner.names, state, values, strict=True):
        path, _, last = name.rpartition(".")
        fresh = _copy(new)
        value = (
            torch.nn.Parameter(fresh, old.requires_grad)
            if isinstance(old, torch.nn.Parameter)
            else fresh
        )
        setattr(runner.instance.get_submodule(path), last, value)


def _substitute(
    runner: ModuleRunner, state: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """Put plain tensors in the place of the parameters, as `torch.func.functional_call` does for a
    call; buffers likewise.
    """
    for name, old, new in zip(runner.names, state, values, strict=True):
        path, _, last = name.rpartition(".")
        part = runner.instance.get_submodule(path)
        tensors_by_name: Any = part._parameters if last in part._parameters else part._buffers
        tensors_by_name[last] = _copy(new).requires_grad_(old.requires_grad)


def _restore_parameters(runner: ModuleRunner) -> None:
    """Make parameters again of plain tensors that `_substitute` left, for the next update."""
    for part in runner.instance.modules():
        parameters: dict[str, Any] = part._parameters
        for name, tensor in list(parameters.items()):
            if tensor is not None and not isinstance(tensor, torch.nn.Parameter):
                parameters[name] = torch.nn.Parameter(tensor.detach(), tensor.requires_grad)


def _write_to_copy(
    runner: ModuleRunner, _: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """A deep copy of the module takes its place and gets the values; the original keeps its own."""
    runner.replace(copy.deepcopy(runner.instance))
    for tensor, new in zip(runner.state(), values, strict=True):
        tensor.data.copy_(new)


def _lay_out_channels_last(old: torch.Tensor, new: torch.Tensor) -> None:
    # As `module.to(memory_format=torch.channels_last)` does with the weights of convolutions.
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(new.dim())
    old.data = _copy(new) if memory_format is None else new.clone(memory_format=memory_format)


_UPDATES: dict[
    str, Callable[[ModuleRunner, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
] = {
    "copy": _write_each(lambda old, new: old.copy_(new)),
    "data": _write_each(_repoint),
    # Writes through .data do not move Tensor._version.
    "data_copy": _write_each(lambda old, new: old.data.copy_(new)),
    "load": _load_state(assign=False),
    "assign": _load_state(assign=True),
    "sgd": _step_sgd(foreach=False),
    "foreach": _step_sgd(foreach=True),
    # Fused optimisers do not move Tensor._version (seen on a CPU, torch 2.13).
    "fused": _step_sgd(fused=True),
    "swap": _swap_parameters,
    "inference": _copy_in_inference_mode,
    "functional": _substitute,
    "deepcopy": _write_to_copy,
    "channels_last": _write_each(_lay_out_channels_last),
}


def _view_span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory span of a tensor as one dimension; elements that overlap are in it once."""
    return tensor.as_strided(
        (storage_extent(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset()
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # clone() alone would not keep strides that skip or repeat memory.
    return _view_span(tensor.detach()).clone().as_strided(tensor.shape, tensor.stride())


HANDLERS: dict[str, Callable[[Session, Request], Answer]] = {
    "rewrite": _rewrite,
    "arrange": _arrange,
    "scribble": _scribble,
    "soak": _soak,
    "state": _read_state,
    "update": _update,
    "transform": _transform,
    "share_instance": _share_instance,
    "reenter": _reenter,
    "side_stream": _run_on_side_stream,
    "capture": _run_captured,
}
