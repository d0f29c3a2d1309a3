"""Probes the machine: which Target this is, and what the user's flags permit. Decisions take its
answers as arguments.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sysconfig
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from torch_cudal1.core.settings import Settings, select_environment
from torch_cudal1.core.version import __version__
from torch_cudal1.ir.records import TOLERANCE_VERSION, Contract, Target

__all__ = [
    "compiler_digest",
    "contract_for",
    "find_device",
    "judge_identity",
    "make_attestation",
    "target_for",
    "triton_version",
]


def target_for(device: torch.device) -> Target:
    """The Target of `device`; an index-less "cuda" means the current one."""
    if device.type != "cuda":
        return Target(
            device.type,
            platform.machine() or "unknown",
            _read_cpu_model(),
            "",
            torch.__version__,
            triton_version(),
        )
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return Target(
        "cuda", f"sm_{major}{minor}", name, _read_cuda_driver(), torch.__version__, triton_version()
    )


def contract_for(settings: Settings) -> Contract:
    """The precision contract under the user's settings and torch's flags as they stand now (TF32
    rights, per op class).
    """
    rights = []
    if torch.backends.cuda.matmul.allow_tf32:
        rights.append("matmul")
    # True by default in PyTorch, unlike the flag of matmul: eager's convolutions may use TF32
    # without a setting of the user.
    if torch.backends.cudnn.allow_tf32:
        rights.append("conv")
    if settings.precision == "strict" or not torch.cuda.is_available():
        # "strict" takes the rights away whatever the flags say; without a GPU the flags do nothing.
        rights = []
    return Contract(settings.precision, tuple(rights), settings.assume_finite)


def find_device(tensors: object) -> torch.device:
    """The device of the first CUDA tensor of an iterable, else the CPU."""
    for item in tensors if isinstance(tensors, (list, tuple)) else ():
        if isinstance(item, torch.Tensor) and item.device.type == "cuda":
            return item.device
    return torch.device("cpu")


@cache
def judge_identity() -> str:
    """16 hex digits that stand for this machine, so that evidence can say where it was made without
    naming the machine. They tell machines apart and prove nothing.
    """
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        machine = ""
    # man 5 machine-id: the id must not be published as it is, but hashed together with the name of
    # an application. The host name is in it too, because containers of one image share the id.
    return hashlib.sha256(f"torch-cudal1 judge|{machine}|{platform.node()}".encode()).hexdigest()[
        :16
    ]


def make_attestation() -> dict[str, str | int]:
    """The machine and the versions, beside those of the Target, under which evidence was made."""
    return {
        "judge": judge_identity(),
        "tolerance_version": TOLERANCE_VERSION,
        "package": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


@cache
def triton_version() -> str:
    """Version of the installed Triton, "" if there is none. Triton is not imported."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


@cache
def compiler_digest(device_type: str) -> str:
    """16 hex digits that stand for the compilers that Inductor would use here; "" where there is
    none.

    They change when a compiler, Python's headers or Triton are installed or replaced. Without a GPU
    the compiler is a C++ one (torch's own reading of CXX), else a C compiler for Triton.
    """
    # Seconds to import, and needed only for a choice in which Inductor had no part.
    from torch._inductor import config

    cxx = (config.cpp.cxx,) if isinstance(config.cpp.cxx, str) else config.cpp.cxx
    names = (
        (select_environment(("CC",), ()).get("CC"), "gcc", "clang", "cc")
        # On a GPU a C compiler builds Triton's launcher; on a CPU a C++ compiler builds the
        # kernels.
        if device_type == "cuda"
        else cxx
    )
    compiler_paths = [
        # `gcc` is often a link: an update replaces what it leads to.
        os.path.realpath(path)
        for name in names
        if name and (path := shutil.which(name))
    ]
    if not compiler_paths:
        return ""
    # Triton builds its launcher against Python.h, so a compiler without it is of no use.
    headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    # A digest, because evidence is published and a path may name a user.
    return hashlib.sha256(
        "|".join([*compiler_paths, str(headers), triton_version()]).encode()
    ).hexdigest()[:16]


@cache
def _read_cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


@cache
def _read_cuda_driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return str(torch.version.cuda)
    words = text.split()
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "unknown")
