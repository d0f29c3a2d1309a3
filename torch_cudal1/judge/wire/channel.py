"""Frames between the judge and its child: a length and a JSON object. Tensors travel beside them in
safetensors files, or in GPU memory that both share (`arena`).

Each request carries a nonce that its answer must echo. Both directions have a size limit. Nothing
is unpickled, so a broken or hostile child can send nonsense, but run no code in the judge. This
module does not interpret the messages.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.judge.wire.arena import ALIGNMENT_BYTES, Arena, find_arena

__all__ = [
    "DTYPES",
    "MAX_FRAME_BYTES",
    "Channel",
    "describe_placed_layout",
    "lies_in_arena",
    "load_tensors",
    "message_bytes",
    "save_tensors",
    "storage_extent",
]

# The JSON of a Program of 100,000 steps is about 30 MB.
MAX_FRAME_BYTES = 64 << 20
# How much larger than its blocks a file may be: some file systems store small files in the inode.
_HEADER_BYTES = 1 << 20
_HEADER = struct.Struct(">I")
# Linux reads at most 2 GiB per call.
_AT_ONCE_BYTES = 1 << 30
# The names of dtypes in a safetensors file.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
# Length of a layout item for a tensor in shared memory: dtype, shape, strides, offset.
_PLACED = 4


class Channel:
    """One end of a connected stream socket, carrying JSON objects."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: Mapping[str, Any], *, deadline: float | None = None) -> None:
        """Write one frame before `deadline` (seconds of `time.monotonic()`). Raises TimeoutError past
        it, as when the peer does not read, and SandboxError when the peer is gone.
        """
        body = json.dumps(message).encode()
        if len(body) > MAX_FRAME_BYTES:
            raise SandboxError(
                "sending", f"a frame of {len(body)} bytes, at most {MAX_FRAME_BYTES}"
            )
        try:
            # A child that does not read fills the socket's buffer; sendall would then wait without
            # end.
            self._wait_until(deadline)
            self._sock.sendall(_HEADER.pack(len(body)) + body)
        except TimeoutError:
            raise
        except OSError as error:
            raise SandboxError("sending", f"{type(error).__name__}: {error}") from error

    def receive(self, *, deadline: float | None = None) -> dict[str, Any]:
        """Read one frame. Raises TimeoutError past `deadline`, EOFError when the peer hung up,
        SandboxError for garbage.
        """
        (size,) = _HEADER.unpack(self._receive_exactly(_HEADER.size, deadline))
        # Before any byte of it is read: a child could announce 4 GiB.
        if size > MAX_FRAME_BYTES:
            raise SandboxError(
                "reading a frame", f"announced {size} bytes, at most {MAX_FRAME_BYTES}"
            )
        body = self._receive_exactly(size, deadline)
        try:
            message = json.loads(body)
        # RecursionError: brackets nested without end.
        except (ValueError, RecursionError) as error:
            raise SandboxError("reading a frame", f"not JSON: {body[:80]!r}") from error
        if not isinstance(message, dict):
            raise SandboxError(
                "reading a frame", f"expected a JSON object, came {type(message).__name__}"
            )
        return message

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _receive_exactly(self, size: int, deadline: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._wait_until(deadline)
            try:
                part = self._sock.recv(min(size - len(parts), 1 << 20))
            # A peer that was killed resets the connection instead of closing it.
            except ConnectionError:
                part = b""
            if not part:
                raise EOFError("the other side hung up")
            parts += part
        return bytes(parts)

    def _wait_until(self, deadline: float | None) -> None:
        if deadline is None:
            self._sock.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("past the deadline")
        # Set anew before each piece, so a peer that sends single bytes gains no time.
        self._sock.settimeout(left)


def storage_extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of storage a tensor with this shape and these strides spans; 0 for an empty
    tensor.
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def message_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """The most bytes that a message of these tensors takes in an arena."""
    present = [tensor for tensor in tensors if tensor is not None]
    return sum(
        storage_extent(t.shape, t.stride()) * t.element_size() + ALIGNMENT_BYTES for t in present
    )


def save_tensors(tensors: Sequence[torch.Tensor | None], path: Path) -> list[list[Any] | None]:
    """Write tensors, with their strides, to `path`; returns the layout (JSON) that `load_tensors`
    needs.

    Where the folder has an arena and they all fit into it, they go there instead, and no file is
    written.
    """
    arena = find_arena(path.parent)
    if arena is not None and (placed := _write_to_arena(tensors, arena)) is not None:
        return placed
    flat: dict[str, torch.Tensor] = {}
    layout: list[list[Any] | None] = []
    for index, tensor in enumerate(tensors):
        if tensor is None:
            layout.append(None)
            continue
        extent = storage_extent(tensor.shape, tensor.stride())
        # The storage with its gaps, so that strides and overlapping elements arrive as they are.
        storage = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
        # A copy: safetensors refuses tensors that share memory.
        flat[str(index)] = storage.cpu() if storage.device.type != "cpu" else storage.clone()
        layout.append(
            [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(tensor.stride())]
        )
    mode = path.stat().st_mode & 0o777 if path.exists() else None
    save_file(flat, str(path))
    if mode is not None:
        # safetensors replaces the file by a new one that only this user may read, and the child may
        # run as another user.
        path.chmod(mode)
    return layout


def _write_to_arena(
    tensors: Sequence[torch.Tensor | None], arena: Arena
) -> list[list[Any] | None] | None:
    """Write tensors to the arena; their layout with offsets. None where one is on the host, or they
    do not all fit.
    """
    plain = [tensor.detach() for tensor in tensors if tensor is not None]
    if not plain or any(tensor.device.type != arena.device.type for tensor in plain):
        return None
    spans = [(t.data_ptr(), storage_extent(t.shape, t.stride()) * t.element_size()) for t in plain]
    return describe_placed_layout(tensors, arena.write(spans))


def describe_placed_layout(
    tensors: Sequence[torch.Tensor | None], offsets: Sequence[int] | None
) -> list[list[Any] | None] | None:
    """The layout of tensors that lie at these offsets of an arena; None where `offsets` is None."""
    if offsets is None:
        return None
    places = iter(offsets)
    return [
        None
        if t is None
        else [str(t.dtype).removeprefix("torch."), list(t.size()), list(t.stride()), next(places)]
        for t in tensors
    ]


def lies_in_arena(layout: Sequence[Any]) -> bool:
    """Whether a message lies in the arena, where the next one overwrites it."""
    return any(isinstance(item, list) and len(item) == _PLACED for item in layout)


def load_tensors(
    layout: Sequence[Any], path: Path, device: torch.device
) -> list[torch.Tensor | None]:
    """Read the tensors that `save_tensors` wrote, each into a new storage on `device`. Raises
    SandboxError where the layout and the bytes do not fit together.
    """
    try:
        # Everything below comes from the child, so any error is its fault and no crash of the
        # judge.
        if lies_in_arena(layout):
            return _copy_from_arena(layout, path, device)
        with _open_plain_file(path) as (file, size):
            wanted = {str(index): item for index, item in enumerate(layout) if item is not None}
            places, begin = _read_header(file, size, wanted)
            found = {
                name: _read(file, begin, places[name], item, device)
                for name, item in wanted.items()
            }
            return [found.get(str(index)) for index in range(len(layout))]
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
        MemoryError,
        RecursionError,
    ) as error:
        raise SandboxError("reading tensors", f"{type(error).__name__}: {error}") from error


def _copy_from_arena(
    layout: Sequence[Any], path: Path, device: torch.device
) -> list[torch.Tensor | None]:
    arena = find_arena(path.parent)
    if arena is None:
        raise SandboxError(
            "reading tensors", "no memory is shared with the process that says that they lie there"
        )
    found: list[torch.Tensor | None] = []
    for item in layout:
        if item is None:
            found.append(None)
            continue
        spec, extent = _parse_spec(item[:-1], device)
        # Before the allocation: a shape from the child could ask for all memory of the GPU.
        if extent > arena.size_bytes:
            raise SandboxError(
                "reading tensors",
                f"{extent} elements for {spec}, {arena.size_bytes} bytes are shared",
            )
        # A copy: the child may overwrite the arena at any time, also after a check.
        fresh = torch.empty(extent, dtype=spec.torch_dtype, device=arena.device)
        arena.read(int(item[-1]), fresh.data_ptr(), extent * fresh.element_size())
        found.append(fresh.as_strided(spec.shape, spec.strides))
    arena.settle()
    # A Program's binaries are read on the host, wherever the module had them.
    if device.type != arena.device.type:
        found = [None if t is None else t.to(device) for t in found]
    return found


def _parse_spec(item: Sequence[Any], device: torch.device) -> tuple[TensorSpec, int]:
    """The spec of one tensor of a layout, and how many elements its storage needs."""
    dtype, shape, strides = item
    spec = TensorSpec(str(dtype), tuple(map(int, shape)), tuple(map(int, strides)), device.type)
    # Negative strides would reach memory before the storage.
    if min((*spec.shape, *spec.strides), default=0) < 0:
        raise SandboxError("reading tensors", f"negative sizes or strides: {spec}")
    return spec, storage_extent(spec.shape, spec.strides)


@contextmanager
def _open_plain_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file; the file and its size in bytes. Later growth does not count.

    Raises OSError for a link, a pipe or a sparse file.
    """
    # The child can write the folder. O_NOFOLLOW: a link could name a file of the user. O_NONBLOCK:
    # opening a pipe would wait without end. The file is read, not mapped: truncating a mapped file
    # kills its reader (SIGBUS).
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "expected a plain file")
        # A sparse file of a terabyte takes no disk, but memory of the judge.
        if status.st_size > _HEADER_BYTES + 512 * status.st_blocks:
            raise OSError(
                errno.EFBIG, f"{status.st_size} bytes announced, {512 * status.st_blocks} written"
            )
        yield file, status.st_size


def _read_header(
    file: BinaryIO, file_bytes: int, wanted: Collection[str]
) -> tuple[Mapping[str, Any], int]:
    """The header of a safetensors file that must hold the tensors `wanted`, and the position from
    which its offsets count. Raises ValueError for a bad header.

    Source: the safetensors format: 8 bytes with the header's length, then a JSON object.
    """
    # Read here: the library would copy all bytes three times.
    start = file.read(8)
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > MAX_FRAME_BYTES:
        raise ValueError(f"a header of {size} bytes, at most {MAX_FRAME_BYTES}")
    header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"expected a JSON object for a header, came {type(header).__name__}")
    bounds = [tuple(map(int, header[name]["data_offsets"])) for name in wanted]
    tensor_bytes = sum(end - first for first, end in bounds)
    data_bytes = file_bytes - 8 - size
    # None outside the file, and no byte twice: many tensors of one byte range would fill memory.
    is_outside = any(not 0 <= first <= end <= data_bytes for first, end in bounds)
    if is_outside or tensor_bytes > data_bytes:
        raise ValueError(f"tensors of {tensor_bytes} bytes where {data_bytes} are")
    return header, 8 + size


def _read(file: BinaryIO, begin: int, place: Any, item: Any, device: torch.device) -> torch.Tensor:
    """One tensor, read directly into its storage."""
    spec, extent = _parse_spec(item, device)
    first, end = map(int, place["data_offsets"])
    # Header and layout must agree on the bytes, or part of the storage would stay uninitialised:
    # old memory of the judge.
    size = extent * spec.torch_dtype.itemsize
    if (
        place["dtype"] != DTYPES.get(spec.torch_dtype)
        or list(place["shape"]) != [extent]
        or end - first != size
    ):
        raise SandboxError(
            "reading tensors",
            f"{place['shape']} elements of {place['dtype']} in {end - first} bytes for {spec}",
        )
    flat = torch.empty(extent, dtype=spec.torch_dtype)
    _fill(file.fileno(), begin + first, flat.data_ptr(), size)
    return flat.to(device).as_strided(spec.shape, spec.strides)


def _fill(fd: int, offset: int, address: int, size: int) -> None:
    done = 0
    while done < size:
        part = min(size - done, _AT_ONCE_BYTES)
        count = os.preadv(fd, [(ctypes.c_char * part).from_address(address + done)], offset + done)
        # The child truncated the file after the check of its size.
        if not count:
            raise OSError(errno.EIO, f"{done} of {size} bytes are there")
        done += count
