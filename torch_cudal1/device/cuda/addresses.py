"""Gives the C++ extension what it needs of CUDA: addresses of driver functions, launches as tuples,
and the exceptions for its failures.

The extension is built without CUDA, so Python looks the addresses up and passes them as numbers; a
Refusal says what is missing. Apart from the copy kernels of a graph replay this loads no kernel
(`driver.py` does).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from torch_cudal1.core.errors import DriverError, ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.copy_kernels import load_copy_kernels
from torch_cudal1.device.cuda.driver import (
    ALIGNMENT,
    LAUNCH_HINT,
    Frame,
    LoadedLaunch,
    driver_status,
    open_driver,
)
from torch_cudal1.ir.program import Value

__all__ = [
    "find_launch_addresses",
    "find_replay_addresses",
    "find_timer_addresses",
    "pack_launch",
    "raise_driver_error",
    "raise_launch_failure",
]

# Of PyTorch's stable C interface: the extension, built without CUDA, cannot call the C++ one.
_STREAM_LIBRARY, _STREAM_FUNCTION = (
    "libtorch_cuda.so",
    "aoti_torch_get_current_cuda_stream",
)
# What several launches in one CUDA graph need (since driver 12.0); without one of them they are
# launched one by one.
_GRAPHS = (
    "cuStreamIsCapturing",
    "cuGraphLaunch",
    "cuGraphCreate",
    "cuGraphAddKernelNode_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
)
# In the order in which csrc/replay.cpp reads them.
_REPLAY = (
    "cuMemcpyDtoDAsync_v2",
    "cuGraphLaunch",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuGraphClone",
    "cuGraphGetNodes",
    "cuGraphGetEdges",
    "cuGraphNodeGetType",
    "cuGraphMemsetNodeGetParams",
    "cuGraphMemcpyNodeGetParams",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddDependencies",
    "cuGraphDestroyNode",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
)
# Tells of edges across which a kernel begins before the one ahead has ended (since driver 12.3).
_EDGES_WITH_DATA = "cuGraphGetEdges_v2"
# In the order in which csrc/timer.cpp reads them.
_TIMER = (
    "cuCtxSynchronize",
    "cuMemsetD8Async",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventElapsedTime",
    "cuEventDestroy_v2",
)


def find_launch_addresses(loaded: LoadedLaunch) -> tuple[int, ...] | Refusal:
    """The context and the addresses of the functions that a launch calls. A Refusal where C code
    cannot ask PyTorch for its current stream.
    """
    stream = _find_stream_function()
    if isinstance(stream, Refusal):
        return stream
    names = ("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    library = loaded.driver.library
    # 0 tells the extension that this driver lacks the function: it then launches without a graph.
    graphs = [_read_address(library, name) if hasattr(library, name) else 0 for name in _GRAPHS]
    return (
        loaded.context.value or 0,
        *(_read_address(library, name) for name in names),
        stream,
        *graphs,
    )


def find_replay_addresses(device: torch.device) -> tuple[int, ...] | Refusal:
    """The context of `device` and the addresses of the functions that a graph replay calls
    (csrc/replay.cpp). A Refusal says why there are none.

    Loads the kernels of `copy_kernels`, so it must not be called while a CUDA graph is captured.
    """
    addresses = _find_addresses(
        device, ("cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"), _REPLAY
    )
    if isinstance(addresses, Refusal):
        return addresses
    library = open_driver().library
    # 0 tells the extension that this driver lacks it.
    edges = _read_address(library, _EDGES_WITH_DATA) if hasattr(library, _EDGES_WITH_DATA) else 0
    return (*addresses, edges, *load_copy_kernels(_index(device)))


def find_timer_addresses(device: torch.device) -> tuple[int, ...] | Refusal:
    """The same for a timer (csrc/timer.cpp)."""
    return _find_addresses(device, ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"), _TIMER)


def _find_addresses(
    device: torch.device, before: Sequence[str], after: Sequence[str]
) -> tuple[int, ...] | Refusal:
    """(context, functions `before`, PyTorch's current stream, functions `after`), or why there are
    none.
    """
    usable, reason = driver_status()
    if not usable:
        return Refusal(reason)
    stream = _find_stream_function()
    if isinstance(stream, Refusal):
        return stream
    driver = open_driver()
    # Beyond driver_status: graphs need newer functions than a launch does.
    missing = [name for name in (*before, *after) if not hasattr(driver.library, name)]
    if missing:
        return Refusal(f"the CUDA driver lacks {', '.join(missing)}; update it")
    context = driver.retain_context(_index(device))
    first, last = (
        [_read_address(driver.library, name) for name in names] for names in (before, after)
    )
    return (context.value or 0, *first, stream, *last)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def raise_driver_error(call: str, result: int) -> NoReturn:
    """Raise the DriverError of a driver function that answered `result`."""
    open_driver().fail(call, result, LAUNCH_HINT)


def _read_address(library: Any, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def _find_stream_function() -> int | Refusal:
    """The address of PyTorch's C function for its current stream, or why it is not there."""
    try:
        # NOLOAD: only the library that PyTorch itself runs on is of use. A second copy would have
        # streams of its own, and a PyTorch for the CPU has none.
        torch_cuda = ctypes.CDLL(_STREAM_LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError as error:
        return Refusal(f"{_STREAM_LIBRARY} is not loaded in this process: {error}")
    if not hasattr(torch_cuda, _STREAM_FUNCTION):
        return Refusal(f"{_STREAM_LIBRARY} of torch {torch.__version__} has no {_STREAM_FUNCTION}")
    return _read_address(torch_cuda, _STREAM_FUNCTION)


def pack_launch(loaded: LoadedLaunch) -> tuple[Any, ...]:
    """(symbol, function, grid, block, shared bytes, attributes, parameter words, (parameter, value,
    mask) of each pointer).
    """
    launch, frame = loaded.launch, Frame(loaded.launch, loaded.starts_early)
    attributes = [(attribute.id, list(attribute.value)) for attribute in frame.attributes]
    # As bytes: C++ stores them as they are, so a float keeps its bit pattern.
    words = [int.from_bytes(bytes(slot), "little") for slot in frame.slots]
    masks = dict.fromkeys(launch.aligned, ALIGNMENT - 1)
    pointers = [
        (position, arg.value.index, masks.get(arg.value.index, 0))
        for position, arg in enumerate(launch.args)
        if isinstance(arg.value, Value)
    ]
    config = frame.config
    grid = tuple(config.grid)
    return (
        launch.symbol,
        loaded.function.value,
        grid,
        config.block[0],
        config.shared_bytes,
        attributes,
        words,
        pointers,
    )


def raise_launch_failure(kind: int, symbol: str, value: int, detail: int) -> NoReturn:
    """Raise the exception for a failed launch of the C++ executor. `kind` is LaunchFailure::Kind of
    csrc/launch.h.
    """
    where = f"kernel {symbol!r}" if symbol else "the launches of this Program"
    if kind == 0:
        raise ProgramError(
            "device", f"{where}: value {value} is absent, expected a tensor on the Program's device"
        )
    if kind == 1:
        raise ProgramError(
            "device", f"{where}: value {value} is on device {detail}, expected the Program's device"
        )
    if kind == 2:
        raise ProgramError(
            "alignment",
            f"{where}: value {value} starts at {detail:#x}, expected a multiple of {ALIGNMENT} bytes",
        )
    if kind == 4:
        raise DriverError(
            _STREAM_FUNCTION,
            f"error {detail}",
            f"{where}: PyTorch has no current stream on device {value}",
        )
    call = "cuLaunchKernelEx" if kind == 3 else "cuCtxGetCurrent"
    open_driver().fail(call, detail, f"{where}; {LAUNCH_HINT}")
