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
    """Load, clocks, temperature and throttling of the device now (JSON); `unknown` with the reason
    where the driver cannot tell.
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
        return _query_nvml(library, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    finally:
        library.nvmlShutdown()


def reset_persisting_l2(device: torch.device) -> Refusal | None:
    """Give lines that a kernel pinned in the L2 cache back, and let none be pinned from now on. A
    Refusal where that cannot be done.
    """
    if device.type != "cuda":
        return Refusal("not a CUDA device")
    torch.cuda.synchronize(device)  # and makes its context this thread's
    try:
        library = ctypes.CDLL(_CUDA)
        reset, limit = library.cuCtxResetPersistingL2Cache, library.cuCtxSetLimit
    except (OSError, AttributeError) as error:
        return Refusal(f"the driver cannot: {error}")
    for name, status in (
        ("cuCtxResetPersistingL2Cache", reset()),
        ("cuCtxSetLimit", limit(ctypes.c_int(_PERSISTING_L2_CACHE_SIZE), ctypes.c_size_t(0))),
    ):
        if status:  # a GPU without such lines (before sm_80) refuses
            return Refusal(f"{name}: result {status}")
    return None


class _Rates(ctypes.Structure):
    """nvmlUtilization_t, percent over the last sample period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def _query_nvml(library: Any, uuid: str) -> dict[str, Any]:
    handle = ctypes.c_void_p()
    if status := library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return {"unknown": f"nvmlDeviceGetHandleByUUID: result {status}"}

    def number(
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
    reasons = number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    return {
        "utilisation_percent": rates.gpu if busy else None,
        "processes": _processes(library, handle),
        "sm_mhz": number("nvmlDeviceGetClockInfo", _SM),
        "memory_mhz": number("nvmlDeviceGetClockInfo", _MEMORY),
        "most_sm_mhz": number("nvmlDeviceGetMaxClockInfo", _SM),
        "celsius": number("nvmlDeviceGetTemperature", _CELSIUS_OF_GPU),
        "watts": number("nvmlDeviceGetPowerUsage", scale=1e-3),
        "throttle_reasons": None if reasons is None else int(reasons) & ~_IDLE_REASON,
    }


def _processes(library: Any, handle: ctypes.c_void_p) -> int | None:
    """How many processes have a context on it, this one and its children included; None where the
    driver does not tell.
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
