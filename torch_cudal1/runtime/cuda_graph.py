"""CUDA graph replay of a pure function: inputs are copied in, outputs are copied out.

Static inputs (parameters and buffers) are read where they lie, so in-place weight edits are seen.
When one moves to another address, a graph for the new addresses is captured. No output ever shares
memory with a later call's output. A function that draws random
numbers needs `random_graph`. Where the C++ extension is built, a replay costs no Python, and the
copies are nodes of the graph (csrc/replay.cpp).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from torch_cudal1.core import native
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.addresses import find_replay_addresses, raise_driver_error
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.runtime.shared_outputs import Assembly, assemble, split_shared

__all__ = ["GraphedRunner", "capture_calls"]

# Lazy module loading, cuBLAS handles and autotuning must be over before the capture.
_WARMUP_CALLS = 3
# One graph for each set of parameter addresses. The oldest goes when a model's weights move for the
# ninth time: a graph holds the memory of its intermediate values.
_MAX_GRAPHS = 8


@dataclass(frozen=True)
class GraphCapture:
    graph: torch.cuda.CUDAGraph
    # The graph's own copies of the inputs that are not static. Static ones are not kept here, so
    # that the caller alone decides when a weight is freed.
    moving: list[torch.Tensor]
    # An int: the function returns that input itself.
    outputs: list[torch.Tensor | int | None]
    # How results are made of copies of `outputs`, where some of them share memory.
    assembly: Assembly | None = None


class GraphedRunner:
    """Wraps `runner` (a pure function on one CUDA device). `static` are the input positions that
    are parameters or buffers.

    `last`: a pure function that runs after each replay (see `split_last_kernel`). It gets the
    graph's outputs, not copied, then the inputs. Its results are handed out as they are; a result
    that is memory of the graph is copied.

    `written`: static inputs that the function writes to, where they lie. It is then not pure, and
    the caller must pass no moving input in their memory.
    """

    def __init__(
        self,
        runner: Runner,
        static: frozenset[int],
        device: torch.device,
        *,
        last: Runner | None = None,
        written: frozenset[int] = frozenset(),
    ) -> None:
        self._runner, self._static, self._device, self._last = runner, static, device, last
        self._written = written
        self._moving: tuple[int, ...] = ()
        self._assembly: Assembly | None = None
        self._graphs: OrderedDict[tuple[int, ...], GraphCapture] = OrderedDict()
        # The C++ form, from the first call on.
        self._replay: Any = None
        # Why there is no C++ form.
        self.interpreted = ""

    @property
    def direct(self) -> Runner:
        """The C++ form once there is one, else this object. The C++ form calls `_run_uncaptured` where
        it has no graph for a call.
        """
        # Results that share memory are put together in Python.
        return self if self._assembly is not None else self._replay or self

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Copy the moving inputs in, replay, copy the outputs out, all on the current stream."""
        if self._replay is None and torch.cuda.is_current_stream_capturing():
            # The user is capturing: these launches belong into the user's graph.
            return self._run_without_graph(inputs)
        if self._replay is None and not self.interpreted:
            self._moving = tuple(index for index in range(len(inputs)) if index not in self._static)
            self._make_native(len(inputs))
        if self._replay is not None:
            results: list[torch.Tensor | None] = self._replay(inputs)
            return results if self._assembly is None else assemble(self._assembly, results)
        # A graph reads a weight at the address of its capture. `p.data = t` or `.to()` moves it.
        key = tuple(inputs[index].data_ptr() for index in sorted(self._static))
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture(inputs)
            self._graphs[key] = captured
            if len(self._graphs) > _MAX_GRAPHS:
                self._graphs.popitem(last=False)
        if self._moving:
            # One launch for all inputs where PyTorch can, in place of a launch each.
            torch._foreach_copy_(captured.moving, [inputs[index] for index in self._moving])
        captured.graph.replay()
        if self._last is None:
            # Copies, because the next replay writes to the same memory while the caller may still
            # hold this result.
            results = [_hand_out(out, inputs) for out in captured.outputs]
            return results if captured.assembly is None else assemble(captured.assembly, results)
        yielded = [inputs[out] if isinstance(out, int) else out for out in captured.outputs]
        # A first part yields tensors only, never None.
        results = self._last([*yielded, *inputs])  # type: ignore[list-item]
        return [_copy_if_in_graph(out, captured) for out in results]

    def _run_without_graph(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The function without a graph."""
        results = self._runner(inputs)
        return results if self._last is None else self._last([*results, *inputs])  # type: ignore[list-item]

    def _make_native(self, inputs: int) -> None:
        extension = native.extension()
        if extension is None:
            self.interpreted = native.status()[1]
        elif not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
            self.interpreted = (
                f"torch {torch.__version__} does not tell the handle of a captured graph"
            )
        elif isinstance(addresses := find_replay_addresses(self._device), Refusal):
            self.interpreted = addresses.reason
        # C++ calls the last step without the interpreter, so only a plan can be one.
        elif self._last is not None and not isinstance(self._last, extension.Plan):
            self.interpreted = "its last step runs in Python"
        else:
            static, max_graphs = tuple(sorted(self._static)), _MAX_GRAPHS
            self._replay = extension.Replay(
                self._run_uncaptured,
                raise_driver_error,
                inputs,
                static,
                self._device,
                addresses,
                max_graphs,
                self._last,
            )

    def _run_uncaptured(
        self, inputs: Sequence[torch.Tensor], capturing: bool
    ) -> list[torch.Tensor | None]:
        """Serve a call that the C++ form cannot: no graph was captured at these addresses, or the
        user is capturing.
        """
        # The user's capture gets the plain launches, as in `__call__`.
        if capturing or torch.cuda.is_current_stream_capturing():
            return self._run_without_graph(inputs)
        captured = self._capture(inputs)
        self._assembly = captured.assembly
        # The graph as captured: C++ adds the copies as nodes and makes it executable.
        handle = captured.graph.raw_cuda_graph()
        self._replay.add(
            tuple(inputs), handle, tuple(captured.moving), tuple(captured.outputs), captured
        )
        results: list[torch.Tensor | None] = self._replay(inputs)
        return results

    def _capture(self, inputs: Sequence[torch.Tensor]) -> GraphCapture:
        _refuse_other_devices("input", inputs, self._device)
        captured_inputs = [
            # A moving input lies elsewhere at each call, so the graph reads a copy with a fixed
            # address.
            t if index in self._static else _copy_with_strides(t)
            for index, t in enumerate(inputs)
        ]
        with torch.cuda.device(self._device), _preserve([inputs[i] for i in self._written]):
            # Warm-up on a side stream, as PyTorch's notes on CUDA graphs ask for, ordered after and
            # before the work of the current one.
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARMUP_CALLS):
                    self._runner(captured_inputs)
            torch.cuda.current_stream().wait_stream(side)
            # keep_graph: raw_cuda_graph() needs the graph as it was before instantiation.
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                results = self._runner(captured_inputs)
        _refuse_other_devices("output", results, self._device)
        results, assembly = split_shared(results)
        if assembly is not None and self._last is not None:
            raise NotLowerableError("two outputs share memory, and a last step would write to both")
        outputs = [
            # An input that is returned is the caller's own tensor again, as in eager, and not a
            # copy.
            next((i for i, t in enumerate(captured_inputs) if t is out), out)
            for out in results
        ]
        moving = [captured_inputs[index] for index in self._moving]
        return GraphCapture(graph, moving, outputs, assembly)


def capture_calls(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`call`, which has run before, as a CUDA graph to be timed: its copies and fills are what they
    are in a GraphedRunner's graph. Nothing is handed out; the graph's memory lives as long as what
    is returned.
    """
    extension = native.extension()
    keeps_graph = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")
    # Before the capture: finding the addresses loads kernels.
    addresses = find_replay_addresses(device)
    # `torch.cuda.graph` would empty the allocator's cache first, which takes longer than the timing.
    graph = torch.cuda.CUDAGraph(keep_graph=True) if keeps_graph else torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
    if extension is None or not keeps_graph or isinstance(addresses, Refusal):
        return graph.replay
    # A replay without inputs never needs the slow way.
    replay = extension.Replay(graph.replay, raise_driver_error, 0, (), device, addresses, 1, None)
    replay.add((), graph.raw_cuda_graph(), (), (), graph)
    return partial(replay, ())


@contextmanager
def _preserve(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put the values of `tensors` back afterwards: the warm-up writes to them, the capture does not."""
    saved = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        if saved:
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
                torch._foreach_copy_(list(tensors), saved)


def _refuse_other_devices(
    role: str, tensors: Sequence[torch.Tensor | None], device: torch.device
) -> None:
    """Raises NotLowerableError for a tensor on the CPU or on another GPU.

    A number on the CPU becomes an argument of a kernel, and a graph would keep the value that it
    had at the capture.
    """
    for position, tensor in enumerate(tensors):
        if tensor is None or (
            tensor.device.type == device.type and device.index in (None, tensor.device.index)
        ):
            continue
        raise NotLowerableError(
            f"{role} {position} is on {tensor.device}, and a CUDA graph serves tensors on {device}"
        )


def _hand_out(
    out: torch.Tensor | int | None, inputs: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    if isinstance(out, int):
        return inputs[out]
    return out if out is None else _copy_with_strides(out)


def _copy_if_in_graph(result: torch.Tensor | None, captured: GraphCapture) -> torch.Tensor | None:
    """A result of a last step; a copy of it where it lies in memory that the next replay
    overwrites.
    """
    if result is None:
        return None
    graph_tensors = [
        tensor
        for tensor in (*captured.moving, *captured.outputs)
        if isinstance(tensor, torch.Tensor)
    ]
    # By storage: a result may be a view of the graph's memory at any offset.
    storages = {tensor.untyped_storage().data_ptr() for tensor in graph_tensors}
    return _copy_with_strides(result) if result.untyped_storage().data_ptr() in storages else result


def _copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    # Elements of an expanded tensor share memory, and copy_ refuses such a destination. So each
    # element in memory is copied once.
    if 0 in tensor.stride():
        base = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
        fresh[tuple(base)].copy_(tensor[tuple(base)])
        return fresh
    return fresh.copy_(tensor)
