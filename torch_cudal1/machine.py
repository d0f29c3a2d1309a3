"""Probes the machine: which Target this is, and what the user's flags permit. Decisions take its answers as arguments."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from torch_cudal1.records import Contract, Target
from torch_cudal1.settings import Settings

__all__ = ["contract_for", "device_of", "target_for", "triton_version"]


def target_for(device: torch.device) -> Target:
    """The Target of `device`; an index-less "cuda" means the current one."""
    if device.type != "cuda":
        return Target(device.type, platform.machine() or "unknown", _cpu_model(), "", torch.__version__, triton_version())
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return Target("cuda", f"sm_{major}{minor}", name, _cuda_driver(), torch.__version__, triton_version())


def contract_for(settings: Settings) -> Contract:
    """The precision contract under the user's settings and torch's flags as they stand now (TF32 rights, per op class)."""
    rights = []
    if torch.backends.cuda.matmul.allow_tf32:
        rights.append("matmul")
    if torch.backends.cudnn.allow_tf32:
        rights.append("conv")
    if settings.precision == "strict" or not torch.cuda.is_available():
        rights = []
    return Contract(settings.precision, tuple(rights), settings.assume_finite)


def device_of(tensors: object) -> torch.device:
    """The device of the first CUDA tensor of an iterable, else the CPU."""
    for item in tensors if isinstance(tensors, (list, tuple)) else ():
        if isinstance(item, torch.Tensor) and item.device.type == "cuda":
            return item.device
    return torch.device("cpu")


@cache
def triton_version() -> str:
    """Version of the installed Triton, "" if there is none. Triton is not imported."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


@cache
def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


@cache
def _cuda_driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return str(torch.version.cuda)
    words = text.split()
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "unknown")
