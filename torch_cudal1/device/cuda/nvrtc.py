"""Compiles CUDA C++ to a cubin with NVRTC, opened at run time: no toolkit, no driver and no GPU are
needed.

`compile_cuda` takes source text and gives machine code for one architecture, or a `Refusal` with
the compiler's log. The library is looked for beside PyTorch, among NVIDIA's wheels and where the
loader looks. Headers come from Triton's wheel or a CUDA wheel: cuda_fp16.h, cuda_bf16.h,
cuda_fp8.h, mma.h; there are no host headers. The source may be untrusted, so this runs in the
sandboxed child only. It checks and loads nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.core.refusal import Refusal

__all__ = ["CompiledCuda", "compile_cuda", "nvrtc_status"]

_SUCCESS = 0
_NEEDED = (
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcDestroyProgram",
    "nvrtcGetErrorString",
    "nvrtcVersion",
)
# Characters of a compiler log that are kept.
_LOG_LIMIT = 4_000
# Options that make NVRTC read or write files. The source and its options may be untrusted.
_PRIVATE = (
    "-I",
    "--include-path",
    "-include",
    "--pre-include",
    "-pch",
    "--pch",
    "--use-local-env",
    "-o",
    "--output",
)


@dataclass(frozen=True)
class CompiledCuda:
    """Machine code (an ELF image) and the compiler's warnings."""

    cubin: bytes
    log: str = ""


def nvrtc_status() -> tuple[bool, str]:
    """Whether NVRTC can be called, and which one (path and version); or why not. Looked up once in
    a process.
    """
    library, path_or_reason = _library()
    if library is None:
        return False, path_or_reason
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return True, f"{path_or_reason} ({major.value}.{minor.value})"


def compile_cuda(
    source: str, arch: str, *, options: Sequence[str] = (), name: str = "kernel.cu"
) -> CompiledCuda | Refusal:
    """Compile `source` for `arch` ("sm_80", "sm_90a", ...). `options` are NVRTC's own; an option
    that names a file is refused.

    Declare kernels `extern "C"`: a Program launches them by that name. Raises ValueError for text
    with a null character.
    """
    # A C string ends there: NVRTC would compile only the text before it.
    if "\0" in source or "\0" in name:
        raise ValueError("CUDA source holds a null character")
    private = [option for option in options if option.startswith(_PRIVATE)]
    if private:
        return Refusal(
            f"option {private[0]!r} names files; only options that change the code are allowed"
        )
    library, path_or_reason = _library()
    if library is None:
        return Refusal(path_or_reason)
    program = ctypes.c_void_p()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), name.encode(), 0, None, None
    )
    if status != _SUCCESS:
        return Refusal(_describe_status(library, status))
    try:
        return _compile(
            library,
            program,
            [
                f"--gpu-architecture={arch}",
                *options,
                *(f"-I{path}" for path in _find_header_folders()),
            ],
        )
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _compile(
    library: Any, program: ctypes.c_void_p, options: Sequence[str]
) -> CompiledCuda | Refusal:
    words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = library.nvrtcCompileProgram(program, len(options), words)
    log = (
        _read_buffer(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
        .rstrip(b"\0")
        .decode(errors="replace")
    )
    if status != _SUCCESS:
        return Refusal(f"{_describe_status(library, status)}: {log[:_LOG_LIMIT]}".rstrip(": \n"))
    cubin = _read_buffer(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    if not cubin.startswith(b"\x7fELF"):
        return Refusal(
            "NVRTC gave no machine code; the architecture must be a real one (sm_*), not compute_*"
        )
    return CompiledCuda(cubin, log[:_LOG_LIMIT])


def _read_buffer(size_of: Any, fill: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    if size_of(program, ctypes.byref(size)) != _SUCCESS or not size.value:
        return b""
    buffer = ctypes.create_string_buffer(size.value)
    return buffer.raw if fill(program, buffer) == _SUCCESS else b""


def _describe_status(library: Any, status: int) -> str:
    # ctypes takes a result for an int, which would cut the pointer to 32 bits.
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return (library.nvrtcGetErrorString(status) or b"result %d" % status).decode()


@cache
def _library() -> tuple[Any, str]:
    """The opened library and its path, or None and what was tried."""
    failures: list[str] = []
    for path in _iter_candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            failures.append(f"{path}: {error}")
            continue
        # A file of that name may be another release, or no NVRTC at all: it is not called then.
        missing = [function for function in _NEEDED if not hasattr(library, function)]
        if not missing:
            return library, path
        failures.append(f"{path} lacks {missing[0]}")
    return (
        None,
        f"no NVRTC: {failures[0] if failures else 'none was found'}; `pip install nvidia-cuda-nvrtc` brings one",
    )


def _iter_candidates() -> Iterator[str]:
    major = (torch.version.cuda or "").split(".")[0]
    libraries = [
        path
        for folder in _iter_folders()
        for path in sorted(folder.glob("libnvrtc.so.*"))
        if "alt" not in path.name
    ]
    # The library of PyTorch's own CUDA major first (False sorts before True): machine code from
    # another major may need a newer driver.
    yield from map(
        str, sorted(libraries, key=lambda path: path.name.split(".so.")[-1].split(".")[0] != major)
    )
    yield from (f"libnvrtc.so.{number}" for number in dict.fromkeys((major, "13", "12")) if number)


def _iter_folders() -> Iterator[Path]:
    yield Path(torch.__file__).parent / "lib"
    for root in _find_wheel_folders():
        yield from sorted(root.glob("*/lib"))


def _find_wheel_folders() -> list[Path]:
    spec = find_spec("nvidia")
    return (
        [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
    )


def _find_header_folders() -> list[Path]:
    """Folders with NVIDIA's device headers."""
    triton = find_spec("triton")
    triton_folders = (
        [
            Path(place) / "backends/nvidia/include"
            for place in triton.submodule_search_locations or ()
        ]
        if triton
        else []
    )
    folders = [
        folder for root in _find_wheel_folders() for folder in sorted(root.glob("*/include"))
    ] + triton_folders
    return [folder for folder in folders if (folder / "cuda_fp16.h").is_file()][:1]
