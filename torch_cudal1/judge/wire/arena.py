"""GPU memory that the judge shares with one child, so that tensors do not pass through the host.

The judge allocates it, and the child opens it by its handle (CUDA's legacy IPC). It holds one
message at a time. Both sides register it under the child's scratch folder, through whose files
tensors go otherwise. The child may write to it at any time, as to those files: a reader copies the
bytes, checks the offset, and trusts the bytes no more than a file's.

Messages that do not fit, and tensors of the host, go through files. So does everything on a machine
whose processes cannot share GPU memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_cudal1.core.errors import SandboxError

__all__ = [
    "ALIGNMENT_BYTES",
    "Arena",
    "Verbs",
    "find_arena",
    "lend",
    "lend_also",
    "open_arena",
    "return_to_first",
    "share",
    "share_at_once",
    "withdraw",
]

# As PyTorch aligns GPU blocks.
ALIGNMENT_BYTES = 512
_HANDLE_BYTES = 64
# CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that exists.
_LAZY_PEER_ACCESS = 1
Span = tuple[int, int]


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@dataclass(frozen=True)
class Verbs:
    """Functions of the driver: `copy` (target address, source address, bytes), `wait` for the
    device, `free` the memory.
    """

    copy: Callable[[int, int, int], None]
    wait: Callable[[], None]
    free: Callable[[], None]


class Arena:
    """`size_bytes` of GPU memory at `address`, accessed by `verbs`.

    `handle`: what the child opens it by, as hex.
    """

    def __init__(
        self, device: torch.device, address: int, size_bytes: int, verbs: Verbs, handle: str = ""
    ) -> None:
        self.device, self.size_bytes, self.handle = device, size_bytes, handle
        self._address, self._verbs = address, verbs

    def write(self, spans: Sequence[Span]) -> list[int] | None:
        """Copy memory, given as (address, bytes) pairs, to the start of the arena. Returns the
        offset of each, None where they do not fit.

        Waits for earlier work on the device, and for the copies. Raises SandboxError.
        """
        offsets, end = [], 0
        for _, size in spans:
            offsets.append(end)
            end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if end > self.size_bytes:
            return None
        # The tensors may still be computed on another stream.
        self._verbs.wait()
        for offset, (address, size) in zip(offsets, spans, strict=True):
            # An empty tensor has a null address.
            if size:
                self._verbs.copy(self._address + offset, address, size)
        # The other process reads on a stream of its own context, which waits for nothing here.
        self._verbs.wait()
        return offsets

    def read(self, offset: int, address: int, size: int) -> None:
        """Copy `size` bytes at `offset` to `address`; call `settle` before using them. Raises
        SandboxError where they do not lie inside the arena.
        """
        # The offset comes from the child, and an address outside would read memory of the judge.
        if not 0 <= offset <= self.size_bytes - size:
            raise SandboxError(
                "reading tensors", f"{size} bytes at {offset} of {self.size_bytes} that are shared"
            )
        if size:
            self._verbs.copy(address, self._address + offset, size)

    def settle(self) -> None:
        """Wait until all reads are complete. Raises SandboxError."""
        self._verbs.wait()

    def close(self) -> None:
        """Free the memory, or close the mapping."""
        self._verbs.free()


_LENT: dict[Path, Arena] = {}
# Arenas that a larger one replaces for some messages.
_FIRST: dict[Path, Arena] = {}


def lend(folder: Path, arena: Arena) -> None:
    """Send messages whose files would lie in `folder` through `arena`, where they fit."""
    _LENT[folder] = arena


def lend_also(folder: Path, arena: Arena) -> None:
    """Replace the arena of `folder` by a larger one, until `return_to_first`."""
    _FIRST[folder] = _LENT[folder]
    _LENT[folder] = arena


def return_to_first(folder: Path) -> None:
    """Free the larger arena, and use the first one again. Does nothing where there is no larger."""
    if folder in _FIRST:
        _LENT.pop(folder).close()
        _LENT[folder] = _FIRST.pop(folder)


def withdraw(folder: Path) -> None:
    """Stop using an arena for `folder`, and free it. Does nothing where there is none."""
    return_to_first(folder)
    arena = _LENT.pop(folder, None)
    if arena is not None:
        arena.close()


def find_arena(folder: Path) -> Arena | None:
    """The arena of a folder, None where there is none."""
    return _LENT.get(folder)


def share(size_bytes: int, device: torch.device) -> Arena:
    """Allocate an arena that another process can open by its `handle`. Raises SandboxError with the
    driver's call and status.
    """
    cuda = _open_driver(device)
    address, handle = ctypes.c_uint64(), _Handle()
    # Not by PyTorch: a handle opens a whole block, which could hold tensors of the judge.
    _ask(cuda, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
    try:
        _ask(cuda, "cuIpcGetMemHandle", ctypes.byref(handle), address)
    except SandboxError:
        _ask(cuda, "cuMemFree_v2", address)
        raise
    return _make_arena(
        cuda,
        device,
        address,
        size_bytes,
        "cuMemFree_v2",
        ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES).hex(),
    )


def share_at_once(size_bytes: int, device: torch.device) -> Arena:
    """As `share`, but where the GPU is full, PyTorch's cached free memory is released first. Raises
    SandboxError.
    """
    try:
        return share(size_bytes, device)
    except SandboxError:
        torch.cuda.empty_cache()
        return share(size_bytes, device)


def open_arena(handle: str, size_bytes: int, device: torch.device) -> Arena:
    """Open, in the child, the arena that the judge allocated. Raises SandboxError."""
    cuda = _open_driver(device)
    address, given = ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(given), bytes.fromhex(handle), _HANDLE_BYTES)
    # The handle is passed by value, which ctypes must be told.
    cuda.cuIpcOpenMemHandle_v2.argtypes = (
        ctypes.c_void_p,
        _Handle,
        ctypes.c_uint,
    )
    _ask(cuda, "cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _LAZY_PEER_ACCESS)
    return _make_arena(cuda, device, address, size_bytes, "cuIpcCloseMemHandle", handle)


def _make_arena(
    cuda: ctypes.CDLL,
    device: torch.device,
    address: ctypes.c_uint64,
    size_bytes: int,
    free: str,
    handle: str,
) -> Arena:
    def copy(target: int, source: int, size: int) -> None:
        _ask(
            cuda,
            "cuMemcpyDtoD_v2",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size),
        )

    def wait() -> None:
        torch.cuda.synchronize(device)

    def give_back() -> None:
        # The status is ignored: a context that has died has freed the memory already.
        getattr(cuda, free)(address)

    return Arena(device, address.value, size_bytes, Verbs(copy, wait, give_back), handle)


def _open_driver(device: torch.device) -> ctypes.CDLL:
    # Makes the device's context current in this thread.
    torch.cuda.synchronize(device)
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise SandboxError("sharing memory of the GPU", str(error)) from error


def _ask(cuda: ctypes.CDLL, name: str, *given: object) -> None:
    status = getattr(cuda, name)(*given)
    if status:
        raise SandboxError("sharing memory of the GPU", f"{name} answered {status}")
