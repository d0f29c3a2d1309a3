"""Copies the bytes of a call's outputs by address, so that no Python code of a tensor runs: a lazy
result is never computed late.

The type of an output must be exactly torch.Tensor, its storage must hold its bytes, and no mode may
be active. Then its memory is read through ctypes on the host, and through the CUDA driver on a GPU.
It does not stop a thread that writes while the bytes are read.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.wire.arena import find_arena
from torch_cudal1.judge.wire.channel import (
    DTYPES,
    describe_placed_layout,
    save_tensors,
    storage_extent,
)

__all__ = ["RefusedOutput", "copy_raw_tensors", "refuse_lazy", "save_raw_tensors"]

# Bound at import, before any candidate: a patched method of Tensor is not called.
_TENSOR, _PARAMETER, _kind = torch.Tensor, torch.nn.Parameter, type
_modes = (torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack)
_address, _storage, _shape = torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.size
_stride, _offset, _numel = torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.numel
_size, _conjugated, _negated, _layout = (
    torch.UntypedStorage.nbytes,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
    torch.strided,
)
_empty, _view = torch.empty, torch.Tensor.as_strided
_NAMES = dict(DTYPES)
# A GPU tensor passes through a host buffer of this size.
_CHUNK = 64 << 20


class RefusedOutput(SandboxError):
    """An output is no plain tensor with bytes of its own."""

    detector = "fresh_output"

    def __init__(self, reason: str) -> None:
        super().__init__("reading outputs", reason)
        # Unpickling calls the class with `args`.
        self.args = (reason,)


def refuse_lazy(outputs: Sequence[torch.Tensor | None]) -> None:
    """Raises RefusedOutput unless every output's type is exactly torch.Tensor or Parameter, and no
    dispatch or function mode is active.
    """
    for position, out in enumerate(outputs):
        kind = _kind(out)
        # Identity, not the name of the type: a subclass may have any name, and compute when it is
        # compared.
        if out is not None and kind is not _TENSOR and kind is not _PARAMETER:
            raise RefusedOutput(
                f"output {position} is a {kind.__module__}.{kind.__qualname__}, expected exactly torch.Tensor"
            )
    # An active mode would see every operation on the outputs from now on.
    dispatch, function = (count() for count in _modes)
    if dispatch or function:
        raise RefusedOutput(
            f"{dispatch} dispatch modes and {function} function modes are still active after the call, expected none"
        )


def save_raw_tensors(outputs: Sequence[torch.Tensor | None], path: Path) -> list[list[Any] | None]:
    """As `channel.save_tensors`, by address. Raises RefusedOutput for a tensor without bytes."""
    if not all(_is_plain(out) for out in outputs if out is not None):
        # Sparse tensors, and those whose bytes are not their values (lazy conj and neg bits).
        return save_tensors(outputs, path)
    if (arena_layout := _write_to_arena(outputs, path)) is not None:
        return arena_layout
    header: dict[str, Any] = {}
    spans: list[tuple[int, int, bool]] = []
    layout: list[list[Any] | None] = []
    end = 0
    for position, out in enumerate(outputs):
        if out is None:
            layout.append(None)
            continue
        extent = _check_extent(position, out)
        size = extent * out.element_size()
        header[str(position)] = {
            "dtype": _NAMES[out.dtype],
            "shape": [extent],
            "data_offsets": [end, end + size],
        }
        spans.append((_address(out), size, out.device.type == "cuda"))
        layout.append(
            [str(out.dtype).removeprefix("torch."), list(_shape(out)), list(_stride(out))]
        )
        end += size
    text = json.dumps(header).encode()
    # The format aligns the data to 8 bytes.
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for address, size, on_gpu in spans:
            _write(file, address, size, on_gpu=on_gpu)
    return layout


def copy_raw_tensors(outputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Tensors with the bytes that the outputs have now; those whose bytes are not their values as
    they are. Raises RefusedOutput for a tensor without bytes.
    """
    refuse_lazy(outputs)
    copies: list[torch.Tensor | None] = []
    for position, out in enumerate(outputs):
        if out is None or not _is_plain(out):
            copies.append(out)
            continue
        extent = _check_extent(position, out)
        memory = _empty(extent, dtype=out.dtype, device=out.device)
        if extent:
            _copy_bytes(_address(memory), _address(out), extent * out.element_size(), out.device)
        copies.append(_view(memory, _shape(out), _stride(out)))
    return copies


def _is_plain(out: torch.Tensor) -> bool:
    return not (
        out.layout is not _layout or out.dtype not in _NAMES or _conjugated(out) or _negated(out)
    )


def _copy_bytes(target: int, source: int, size: int, device: torch.device) -> None:
    if device.type != "cuda":
        ctypes.memmove(target, source, size)
        return
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoD_v2
    status = copy(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size))
    if status:
        raise RefusedOutput(f"its memory on the GPU cannot be read: CUDA error {status}")


def _write_to_arena(
    outputs: Sequence[torch.Tensor | None], path: Path
) -> list[list[Any] | None] | None:
    """Write to the arena; the layout, or None where there is no arena or it is too small."""
    arena = find_arena(path.parent)
    plain = [(position, out) for position, out in enumerate(outputs) if out is not None]
    if arena is None or not plain or any(out.device.type != arena.device.type for _, out in plain):
        return None
    spans = [
        (_address(out), _check_extent(position, out) * out.element_size())
        for position, out in plain
    ]
    try:
        return describe_placed_layout(outputs, arena.write(spans))
    except SandboxError as error:
        raise RefusedOutput(f"its memory on the GPU cannot be read: {error.found}") from error


def _check_extent(position: int, out: torch.Tensor) -> int:
    extent = storage_extent(_shape(out), _stride(out))
    available = _size(_storage(out))
    # A lazy tensor, or a forged storage, claims bytes that do not exist.
    if extent and (_offset(out) + extent) * out.element_size() > available:
        needed = (_offset(out) + extent) * out.element_size()
        raise RefusedOutput(
            f"output {position} needs {needed} bytes and its storage has {available}"
        )
    # A null address would crash this process when it is read.
    if extent and not _address(out):
        raise RefusedOutput(f"output {position} has {_numel(out)} elements and no memory")
    return extent


def _write(file: IO[bytes], address: int, size: int, *, on_gpu: bool) -> None:
    if not on_gpu:
        if size:
            file.write(memoryview((ctypes.c_char * size).from_address(address)).cast("B"))
        return
    # The driver, as `Tensor.cpu` is an operator that a candidate can override.
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoH_v2
    host = (ctypes.c_char * min(size, _CHUNK))()
    for start in range(0, size, _CHUNK):
        part = min(_CHUNK, size - start)
        status = copy(host, ctypes.c_uint64(address + start), ctypes.c_size_t(part))
        if status:
            raise RefusedOutput(f"its memory on the GPU cannot be read: CUDA error {status}")
        file.write(memoryview(host).cast("B")[:part])
