"""Launches cubins through the CUDA driver API with ctypes: no compiler, no extension and no Triton
at run time.

`load_launch` checks the machine code against the plan and loads it, before any CUDA graph capture.
`prepare_launch` makes it a callable that only writes pointers and launches on PyTorch's current
stream, so it can be captured. `addresses.py` gives the C++ executor the same launch. Nothing here
checks that a kernel stays inside its buffers (the judge does), and nothing is ever unloaded.

`cuda-bindings` offers the same calls. It is not used: importing its driver and NVRTC modules takes
0.4 s and 15 MB in every process, candidates' processes included, and PyTorch's CPU wheels do not
bring it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from torch_cudal1.core.errors import DriverError, ProgramError
from torch_cudal1.device.cuda.cubin import Cubin, check_launch, inspect_cubin
from torch_cudal1.device.cuda.early_start import waits_first
from torch_cudal1.ir.program import Launch, LaunchArg, Value

__all__ = [
    "ALIGNMENT",
    "LAUNCH_HINT",
    "Driver",
    "Frame",
    "LoadedLaunch",
    "driver_status",
    "load_launch",
    "open_driver",
    "prepare_launch",
]

_LIBRARY = "libcuda.so.1"
# All exist since driver 11.8; torch >= 2.11 needs a newer one anyway. cuFuncLoad (12.4) is used
# where it exists.
_NEEDED = (
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernelEx",
    "cuGetErrorName",
)
# CUfunction_attribute, CUlaunchAttributeID and CUclusterSchedulingPolicy of cuda.h
_MAX_DYNAMIC_SHARED_SIZE_BYTES, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
_CLUSTER_DIMENSION, _CLUSTER_SCHEDULING_POLICY_PREFERENCE, _SPREAD = 4, 5, 1
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# A driver without it (before 12.3) cannot capture such launches, and the replay of a captured graph
# reads which launches began early with it.
_EARLY_START_FUNCTION = "cuGraphGetEdges_v2"
# A kernel with more dynamic shared memory has to opt in through cuFuncSetAttribute (CUDA C++
# Programming Guide, shared memory).
_SHARED_WITHOUT_OPT_IN = 48 * 1024
# Blocks of a cluster that every GPU with clusters serves; more is an opt-in of the kernel (CUDA C++
# Programming Guide, thread block clusters).
_PORTABLE_CLUSTER = 8
# Bytes; what Triton assumes of a pointer with tt.divisibility.
ALIGNMENT = 16

_LOAD_HINT = "the cubin does not suit this GPU or driver; run `cudal1 warmup` on this machine"
LAUNCH_HINT = "an earlier kernel may have failed: CUDA_LAUNCH_BLOCKING=1 shows which"

# The driver copies each parameter with the size that the cubin states, so a ctype must have exactly
# that size (cubin.PARAM_BYTES).
_CTYPES: dict[str, Any] = {
    "ptr": ctypes.c_uint64,
    "null": ctypes.c_uint64,
    "i64": ctypes.c_int64,
    "i32": ctypes.c_int32,
    "fp32": ctypes.c_float,
}


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: 72 bytes, the value at 8."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: 56 bytes, the stream at 32, the attributes at 40."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def driver_status() -> tuple[bool, str]:
    """Whether the CUDA driver library can be called, and why not (or which library). Initialises
    nothing.
    """
    try:
        library = _open_library()
    except OSError as error:
        return False, f"no CUDA driver: {error}"
    missing = [name for name in _NEEDED if not hasattr(library, name)]
    return (
        not missing,
        f"the CUDA driver lacks {', '.join(missing)}; update it" if missing else _LIBRARY,
    )


@dataclass(frozen=True, eq=False)
class LoadedLaunch:
    """A launch whose kernel is loaded and ready on device `index`, in PyTorch's context there.

    `starts_early`: before the kernel ahead of it has ended, since it waits for that itself.
    """

    driver: Driver
    context: ctypes.c_void_p
    function: ctypes.c_void_p
    launch: Launch
    index: int
    starts_early: bool = False


def load_launch(cubin: torch.Tensor, launch: Launch, device: torch.device) -> LoadedLaunch:
    """Check `cubin` (the payload, uint8) against `launch` and the device, and load it.

    Raises ProgramError if the cubin does not fit the launch or the device, DriverError without a
    driver or if loading fails.
    """
    usable, reason = driver_status()
    if not usable:
        raise DriverError(
            "dlopen", reason, "kernels need an NVIDIA driver; without one the baseline runs"
        )
    if not torch.cuda.is_available():
        raise DriverError("torch.cuda.is_available", "False", "this PyTorch sees no GPU")
    # PyTorch goes first: it owns the primary context and refuses a forked child.
    torch.cuda.init()
    driver = open_driver()
    index = torch.cuda.current_device() if device.index is None else device.index
    image = bytes(cubin.detach().cpu().contiguous().numpy())
    major, minor = torch.cuda.get_device_capability(index)
    try:
        # Before the driver sees the image: it answers a wrong symbol or architecture with a number,
        # and does not compare the sizes of parameters at all.
        cubin_facts = inspect_cubin(image)
        check_launch(cubin_facts, launch, 10 * major + minor)
        context = driver.retain_context(index)
        with driver.make_current(context):
            function = driver.function(index, image, launch)
    # A Program has many kernels: the symbol tells which of them was refused.
    except ProgramError as error:
        raise ProgramError(error.rule, f"kernel {launch.symbol!r}: {error.found}") from error
    except DriverError as error:
        raise DriverError(
            error.call, error.status, f"kernel {launch.symbol!r}: {error.hint}"
        ) from error
    starts_early = _starts_early(driver, cubin_facts, launch)
    return LoadedLaunch(driver, context, function, launch, index, starts_early)


def _starts_early(driver: Driver, cubin: Cubin, launch: Launch) -> bool:
    code = dict(cubin.code).get(f".text.{launch.symbol}", b"")
    return hasattr(driver.library, _EARLY_START_FUNCTION) and waits_first(code)


def prepare_launch(
    cubin: torch.Tensor, launch: Launch, device: torch.device
) -> Callable[[Sequence[Any]], None]:
    """A callable that launches `launch` on the values of a running Program, on PyTorch's current
    stream of `device`.

    `launch.grid` counts programs as Triton does: with a cluster, x is multiplied by its size. Any
    thread may use the callable; it raises ProgramError for a misplaced or misaligned tensor,
    DriverError if the driver refuses. Raises what `load_launch` raises.
    """
    loaded = load_launch(cubin, launch, device)
    driver, context, function, index = loaded.driver, loaded.context, loaded.function, loaded.index
    frames, place = Frame(launch, loaded.starts_early), torch.device("cuda", index)
    # Bound once: this is all that a launch in Python has to look up at each call.
    start, current_stream = driver.library.cuLaunchKernelEx, torch.cuda.current_stream

    def run(values: Sequence[Any]) -> None:
        frame = frames
        for slot, number, mask in frame.pointers:
            slot.value = _check_address(values[number], number, mask, index, launch.symbol)
        # The stream of the moment, at every call: the caller may have changed it, or be capturing
        # it.
        frame.config.stream = current_stream(place).cuda_stream
        # A push and a pop are two more driver calls, and PyTorch's thread is in the context
        # already.
        if driver.is_current(context, frame.current):
            status = start(frame.config_pointer, function, frame.parameters, None)
        # A thread that has not used this device yet, or is on another one.
        else:
            with driver.make_current(context):
                status = start(frame.config_pointer, function, frame.parameters, None)
        if status:
            driver.fail("cuLaunchKernelEx", status, f"kernel {launch.symbol!r}; {LAUNCH_HINT}")

    return run


def _check_address(tensor: Any, number: int, mask: int, index: int, symbol: str) -> int:
    # A pointer to the host or to another GPU is an illegal access inside the kernel, after which
    # the whole process has lost its CUDA context. Here it is an exception.
    if tensor is None or tensor.get_device() != index:
        place = "absent" if tensor is None else f"on device {tensor.get_device()}"
        raise ProgramError(
            "device",
            f"kernel {symbol!r}: value {number} is {place}, expected a tensor on cuda:{index}",
        )
    address = int(tensor.data_ptr())
    # The kernel loads 16 bytes at once from here. A misaligned address is
    # CUDA_ERROR_MISALIGNED_ADDRESS, which also costs the process its context.
    if address & mask:
        expected = f"expected a multiple of {ALIGNMENT} bytes"
        raise ProgramError(
            "alignment", f"kernel {symbol!r}: value {number} starts at {address:#x}, {expected}"
        )
    return address


class Frame(threading.local):
    """One thread's parameter block and launch configuration; a call only rewrites the pointers and
    the stream.

    The driver copies parameters before it returns, so one block per thread is enough.
    """

    def __init__(self, launch: Launch, starts_early: bool = False) -> None:
        slots = [_make_slot(arg) for arg in launch.args]
        self.pointers = [
            (slot, arg.value.index, ALIGNMENT - 1 if arg.value.index in launch.aligned else 0)
            for slot, arg in zip(slots, launch.args, strict=True)
            if isinstance(arg.value, Value)
        ]
        # Kept: the parameter block holds only their addresses.
        self.slots = slots
        self.parameters = (ctypes.c_void_p * max(len(slots), 1))(
            *[ctypes.addressof(slot) for slot in slots]
        )
        self.attributes = _make_attributes(launch, starts_early)
        self.config = _make_config(launch, self.attributes)
        self.config_pointer = ctypes.byref(self.config)
        self.current = ctypes.c_void_p()


def _make_slot(arg: LaunchArg) -> Any:
    kind = _CTYPES[arg.kind]
    if isinstance(arg.value, Value) or arg.value is None:
        return kind(0)
    slot = kind(arg.value)
    # ctypes wraps an integer that is too large silently: the kernel would get another number.
    if arg.kind != "fp32" and slot.value != arg.value:
        raise ProgramError("launch", f"argument {arg.value} does not fit {arg.kind}")
    return slot


def _make_attributes(launch: Launch, starts_early: bool) -> Any:
    words: dict[int, list[int]] = {}
    if launch.cluster > 1:
        words[_CLUSTER_DIMENSION] = [launch.cluster, 1, 1]
        words[_CLUSTER_SCHEDULING_POLICY_PREFERENCE] = [_SPREAD]
    if starts_early:
        words[_PROGRAMMATIC_STREAM_SERIALIZATION] = [1]
    attributes = (_LaunchAttribute * len(words))()
    for attribute, (number, value) in zip(attributes, words.items(), strict=True):
        attribute.id = number
        attribute.value[: len(value)] = value
    return attributes


def _make_config(launch: Launch, attributes: Any) -> _LaunchConfig:
    x, y, z = launch.grid
    # The plan counts programs, the driver counts blocks. Their product has to fit gridDimX, and
    # ctypes would wrap it silently.
    if not 0 < x * launch.cluster < 2**31:
        raise ProgramError(
            "launch",
            f"grid {launch.grid} times cluster {launch.cluster}; expected 1 to 2**31 - 1 blocks in x",
        )
    return _LaunchConfig(
        # cuLaunchKernelEx counts blocks, and the grid has to be a multiple of the cluster.
        grid=(x * launch.cluster, y, z),
        block=(launch.block, 1, 1),
        shared_bytes=launch.shared_bytes,
        attributes=ctypes.cast(attributes, ctypes.POINTER(_LaunchAttribute))
        if len(attributes)
        else None,
        attribute_count=len(attributes),
    )


@functools.cache
def _open_library() -> Any:
    return ctypes.CDLL(_LIBRARY)


class Driver:
    """The driver library with PyTorch's contexts and the modules loaded so far, for the life of the
    process.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._modules: dict[tuple[int, str], tuple[ctypes.c_void_p, torch.Tensor]] = {}
        # Function -> the most dynamic shared memory that it was ever allowed.
        self._shared_bytes: dict[int | None, int] = {}
        self._lock = threading.RLock()
        self.call("cuInit", ctypes.c_uint(0))

    def call(
        self,
        name: str,
        *args: Any,
        hint: str = "see the CUDA driver API's description of this result",
    ) -> None:
        """Call a driver function. Raises DriverError with the result's name unless it succeeds."""
        status = getattr(self.library, name)(*args)
        if status:
            self.fail(name, status, hint)

    def fail(self, name: str, status: int, hint: str) -> NoReturn:
        """Raises DriverError for a result that is not CUDA_SUCCESS."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        raise DriverError(name, (text.value or b"result %d" % status).decode(), hint)

    def retain_context(self, index: int) -> ctypes.c_void_p:
        """The primary context of device `index`, which is PyTorch's; retained once and kept."""
        with self._lock:
            # Retained once for the life of the process: PyTorch keeps its primary context as long.
            if index not in self._contexts:
                number, context = ctypes.c_int(), ctypes.c_void_p()
                self.call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(index))
                self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
                self._contexts[index] = context
            return self._contexts[index]

    def is_current(self, context: ctypes.c_void_p, current: ctypes.c_void_p) -> bool:
        """Whether this thread is in `context`; `current` is overwritten."""
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        return current.value == context.value

    @contextmanager
    def make_current(self, context: ctypes.c_void_p) -> Iterator[None]:
        """Make `context` this thread's current one, and put the former back."""
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        # Also after a failure: PyTorch's later calls of this thread expect their own context.
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def function(self, index: int, image: bytes, launch: Launch) -> ctypes.c_void_p:
        """The loaded kernel, ready for this launch's shared memory and cluster. The context must be
        current.
        """
        function = ctypes.c_void_p()
        module = self._load_module(index, image)
        self.call(
            "cuModuleGetFunction",
            ctypes.byref(function),
            module,
            launch.symbol.encode(),
            hint=_LOAD_HINT,
        )
        # The limit belongs to the function, which several launches share: one with less shared
        # memory must not lower it for the others.
        with self._lock:
            if launch.shared_bytes > self._shared_bytes.get(function.value, _SHARED_WITHOUT_OPT_IN):
                self._allow(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes)
                self._shared_bytes[function.value] = launch.shared_bytes
        if launch.cluster > _PORTABLE_CLUSTER:
            self._allow(function, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        # With lazy loading (CUDA_MODULE_LOADING) the first launch would load the function, which is
        # not allowed while a graph is captured.
        if hasattr(self.library, "cuFuncLoad"):
            self.call("cuFuncLoad", function, hint=_LOAD_HINT)
        return function

    def _allow(self, function: ctypes.c_void_p, attribute: int, value: int) -> None:
        hint = f"attribute {attribute} = {value} is more than this GPU allows"
        self.call(
            "cuFuncSetAttribute", function, ctypes.c_int(attribute), ctypes.c_int(value), hint=hint
        )

    def _load_module(self, index: int, image: bytes) -> ctypes.c_void_p:
        # By content: Programs that hold the same machine code share one module, and no name in a
        # bundle can stand for other code.
        key = (index, hashlib.sha256(image).hexdigest())
        with self._lock:
            if key not in self._modules:
                # Loading is not allowed during a capture, and the attempt would invalidate the
                # user's graph.
                if torch.cuda.is_current_stream_capturing():
                    raise ProgramError(
                        "capture",
                        "a kernel is not loaded yet; prepare the Program before capturing a CUDA graph",
                    )
                # A clone, because PyTorch aligns its memory to 64 bytes and Python does not.
                aligned = torch.frombuffer(bytearray(image), dtype=torch.uint8).clone()
                module = ctypes.c_void_p()
                data = ctypes.c_void_p(aligned.data_ptr())
                self.call("cuModuleLoadData", ctypes.byref(module), data, hint=_LOAD_HINT)
                # The image is kept, because lazy loading may read it later. A module is never
                # unloaded: a captured graph may still hold its kernel.
                self._modules[key] = (module, aligned)
            return self._modules[key][0]


@functools.cache
def open_driver() -> Driver:
    """The driver of this process. Raises OSError without the library, DriverError if it cannot
    start.
    """
    return Driver(_open_library())
