"""The state of a GPU that timing depends on: load, clocks, temperature, throttling, pinned cache
lines.

Read from the driver's own library (NVML) with ctypes; no package is needed, and where the library
or a figure is absent the answer says so. It changes nothing but the lines pinned in the L2 cache,
of this process's context only. It sets no clocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from torch_cudal1.core.refusal import Refusal

__all__ = ["read_gpu_state", "reset_persisting_l2"]

_NVML, _CUDA = "libnvidia-ml.so.1", "libcuda.so.1"
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_CELSIUS_OF_GPU = 0  # nvmlTemperatureSensors_t
_PERSISTING_L2_CACHE_SIZE = 6  # CUlimit
_IDLE_REASON = 1  # nvmlClocksThrottleReasonGpuIdle: an idle GPU is not a throttled one


def read_gpu_state(device: torch.device) -> dict[str, Any]:
    """Load, clocks, temperature and throttling of the device now, as JSON. Where the driver cannot
    be read, `unknown` holds the reason.
    """
    if device.type != "cuda":
        return {"unknown": "not a CUDA device"}
    try:
        library = ctypes.CDLL(_NVML)
    except OSError as error:
        return {"unknown": f"no NVML: {error}"}
    if status := library.nvmlInit_v2():
        return {"unknown": f"nvmlInit_v2: result {status}"}
    try:
        # By UUID: NVML numbers all GPUs of the machine, CUDA only those in CUDA_VISIBLE_DEVICES.
        return _query_nvml(library, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    finally:
        # NVML counts its initialisations: each one needs its own shutdown.
        library.nvmlShutdown()


def reset_persisting_l2(device: torch.device) -> Refusal | None:
    """Release the lines that a kernel pinned in the L2 cache, and let no kernel pin any from now
    on. A Refusal where the driver or the GPU cannot do that.
    """
    if device.type != "cuda":
        return Refusal("not a CUDA device")
    # Also makes the device's context this thread's, which both calls below act on.
    torch.cuda.synchronize(device)
    try:
        library = ctypes.CDLL(_CUDA)
        reset, limit = library.cuCtxResetPersistingL2Cache, library.cuCtxSetLimit
    except (OSError, AttributeError) as error:
        return Refusal(f"the driver cannot: {error}")
    for name, status in (
        ("cuCtxResetPersistingL2Cache", reset()),
        # A limit of 0: a kernel that pinned its inputs would find them after every flush of the
        # cache, and would be timed on a warm one.
        ("cuCtxSetLimit", limit(ctypes.c_int(_PERSISTING_L2_CACHE_SIZE), ctypes.c_size_t(0))),
    ):
        # A GPU without such lines (before sm_80) refuses.
        if status:
            return Refusal(f"{name}: result {status}")
    return None


class _Rates(ctypes.Structure):
    """nvmlUtilization_t, percent over the last sample period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def _query_nvml(library: Any, uuid: str) -> dict[str, Any]:
    handle = ctypes.c_void_p()
    if status := library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return {"unknown": f"nvmlDeviceGetHandleByUUID: result {status}"}

    def read_number(
        name: str, *selector: int, scale: float = 1, kind: Callable[[], Any] = ctypes.c_uint
    ) -> float | None:
        """One figure, None where this GPU or driver has none."""
        value = kind()
        function = getattr(library, name, None)
        refused = function is None or function(
            handle, *map(ctypes.c_int, selector), ctypes.byref(value)
        )
        return None if refused else value.value * scale

    rates = _Rates()
    busy = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0
    reasons = read_number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    return {
        "utilisation_percent": rates.gpu if busy else None,
        "processes": _count_processes(library, handle),
        "sm_mhz": read_number("nvmlDeviceGetClockInfo", _SM),
        "memory_mhz": read_number("nvmlDeviceGetClockInfo", _MEMORY),
        "most_sm_mhz": read_number("nvmlDeviceGetMaxClockInfo", _SM),
        "celsius": read_number("nvmlDeviceGetTemperature", _CELSIUS_OF_GPU),
        # NVML gives milliwatts.
        "watts": read_number("nvmlDeviceGetPowerUsage", scale=1e-3),
        # An idle GPU lowers its clocks by itself: that is no throttling.
        "throttle_reasons": None if reasons is None else int(reasons) & ~_IDLE_REASON,
    }


def _count_processes(library: Any, handle: ctypes.c_void_p) -> int | None:
    """How many processes have a context on the GPU, including this one and its children. None where
    the driver gives no number.
    """
    count = ctypes.c_uint(0)
    function = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
    if function is None:
        return None
    # NVML_SUCCESS, NVML_ERROR_INSUFFICIENT_SIZE: with no buffer it only counts.
    enough, too_small = 0, 7
    return (
        int(count.value)
        if function(handle, ctypes.byref(count), None) in (enough, too_small)
        else None
    )
