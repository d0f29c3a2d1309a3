"""CUDA graph replay of a pure function, safe to use without thinking: inputs are copied in, outputs
are copied out.

Static inputs (parameters and buffers) are read where they lie, so in-place weight edits are seen;
if one moves to another address, the graph for the new addresses is captured. No output ever shares
memory with a later call's output. Random numbers are refused: their generator would need
registration. Where the C++ extension is built, a replay costs no Python, and the copies are nodes
of the graph (csrc/replay.cpp).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.core import native
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.addresses import find_replay_addresses, raise_driver_error
from torch_cudal1.ir.interpreter import Runner

__all__ = ["GraphedRunner"]

_WARMUP_CALLS = 3  # lazy module loading, cuBLAS handles and autotuning must be over before capture
# one per set of parameter addresses; an old one goes when a model's weights move for the ninth time
_MAX_GRAPHS = 8


@dataclass(frozen=True)
class GraphCapture:
    graph: torch.cuda.CUDAGraph
    moving: list[
        torch.Tensor
    ]  # our copies of the inputs that are not static; the static ones stay the caller's alone
    outputs: list[torch.Tensor | int | None]  # an int: the function returns that input itself


class GraphedRunner:
    """Wraps `runner` (a pure function on one CUDA device). `static` are the input positions that
    are parameters or buffers.

    `last`: a pure function that runs after each replay, given what the graph yields, in place, then
    the inputs; its results are handed out as they are, but for such that are memory of the graph.
    See `last_step`.
    """

    def __init__(
        self,
        runner: Runner,
        static: frozenset[int],
        device: torch.device,
        *,
        last: Runner | None = None,
    ) -> None:
        self._runner, self._static, self._device, self._last = runner, static, device, last
        self._moving: tuple[int, ...] = ()
        self._graphs: OrderedDict[tuple[int, ...], GraphCapture] = OrderedDict()
        self._replay: Any = None  # the C++ form, from the first call on
        self.interpreted = ""  # why there is none

    @property
    def direct(self) -> Runner:
        """The C++ form once there is one, which calls back here for what it has not captured."""
        return self._replay or self

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Copy the moving inputs in, replay, copy the outputs out, all on the current stream."""
        if self._replay is None and torch.cuda.is_current_stream_capturing():
            return self._plainly(
                inputs
            )  # the user is capturing: our launches belong into the user's graph
        if self._replay is None and not self.interpreted:
            self._moving = tuple(index for index in range(len(inputs)) if index not in self._static)
            self._make_native(len(inputs))
        if self._replay is not None:
            results: list[torch.Tensor | None] = self._replay(inputs)
            return results
        key = tuple(inputs[index].data_ptr() for index in sorted(self._static))
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture(inputs)
            self._graphs[key] = captured
            if len(self._graphs) > _MAX_GRAPHS:
                self._graphs.popitem(last=False)
        if self._moving:
            torch._foreach_copy_(captured.moving, [inputs[index] for index in self._moving])
        captured.graph.replay()
        if self._last is None:
            return [_hand_out(out, inputs) for out in captured.outputs]
        yielded = [inputs[out] if isinstance(out, int) else out for out in captured.outputs]
        results = self._last([*yielded, *inputs])  # type: ignore[list-item]  # a first part yields tensors only
        return [_copy_if_in_graph(out, captured) for out in results]

    def _plainly(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
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
        elif self._last is not None and not isinstance(self._last, extension.Plan):
            self.interpreted = "its last step runs in Python"
        else:
            static, max_graphs = tuple(sorted(self._static)), _MAX_GRAPHS
            self._replay = extension.Replay(
                self._uncaptured,
                raise_driver_error,
                inputs,
                static,
                self._device,
                addresses,
                max_graphs,
                self._last,
            )

    def _uncaptured(
        self, inputs: Sequence[torch.Tensor], capturing: bool
    ) -> list[torch.Tensor | None]:
        """A call that the C++ form does not serve: nothing was captured at these addresses, or the
        user is capturing.
        """
        if capturing or torch.cuda.is_current_stream_capturing():
            return self._plainly(inputs)
        captured = self._capture(inputs)
        handle = captured.graph.raw_cuda_graph()  # C++ makes it executable
        self._replay.add(
            tuple(inputs), handle, tuple(captured.moving), tuple(captured.outputs), captured
        )
        results: list[torch.Tensor | None] = self._replay(inputs)
        return results

    def _capture(self, inputs: Sequence[torch.Tensor]) -> GraphCapture:
        _refuse_other_devices("input", inputs, self._device)
        captured_inputs = [
            t if index in self._static else _strided_copy(t) for index, t in enumerate(inputs)
        ]
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARMUP_CALLS):
                    self._runner(captured_inputs)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                results = self._runner(captured_inputs)
        _refuse_other_devices("output", results, self._device)
        _refuse_shared_outputs(results)
        outputs = [
            next((i for i, t in enumerate(captured_inputs) if t is out), out) for out in results
        ]
        return GraphCapture(graph, [captured_inputs[index] for index in self._moving], outputs)


def _refuse_other_devices(
    role: str, tensors: Sequence[torch.Tensor | None], device: torch.device
) -> None:
    """A number on the CPU becomes an argument of a kernel: a graph would keep the one of its
    capture. Nor is another GPU served.
    """
    for position, tensor in enumerate(tensors):
        if tensor is None or (
            tensor.device.type == device.type and device.index in (None, tensor.device.index)
        ):
            continue
        raise NotLowerableError(
            f"{role} {position} is on {tensor.device}, and a CUDA graph serves tensors on {device}"
        )


def _refuse_shared_outputs(results: Sequence[torch.Tensor | None]) -> None:
    """Two outputs that are views of one tensor would be handed out as two copies: a write to one
    must show in the other.
    """
    storages = [
        out.untyped_storage().data_ptr() for out in results if out is not None and out.numel()
    ]
    if len(set(storages)) < len(storages):
        raise NotLowerableError(
            "two outputs share memory, and a CUDA graph would hand out separate copies"
        )


def _hand_out(
    out: torch.Tensor | int | None, inputs: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    if isinstance(out, int):
        return inputs[out]
    return out if out is None else _strided_copy(out)


def _copy_if_in_graph(result: torch.Tensor | None, captured: GraphCapture) -> torch.Tensor | None:
    """A result of a last step, or a copy of it where it is memory that the next replay writes."""
    if result is None:
        return None
    graph_tensors = [
        tensor
        for tensor in (*captured.moving, *captured.outputs)
        if isinstance(tensor, torch.Tensor)
    ]
    storages = {tensor.untyped_storage().data_ptr() for tensor in graph_tensors}
    return _strided_copy(result) if result.untyped_storage().data_ptr() in storages else result


def _strided_copy(tensor: torch.Tensor) -> torch.Tensor:
    fresh = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    if (
        0 in tensor.stride()
    ):  # an expanded tensor: its elements share memory, copy_ would refuse the overlap
        base = [slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()]
        fresh[tuple(base)].copy_(tensor[tuple(base)])
        return fresh
    return fresh.copy_(tensor)
