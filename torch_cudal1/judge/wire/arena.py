"""Memory of a GPU that the judge shares with one child, so that tensors go from one to the other
without passing through the host.

The judge allocates it and the child opens it by its handle (CUDA's legacy IPC); it holds one
message at a time and is known by the child's scratch folder, through which tensors go otherwise.
The child may write to it whenever it likes, as to a file there: whoever reads takes a copy, checks
the place it was told, and believes the bytes no more than a file's.

What it does not do: hold what does not fit, or tensors of the host; those go through files. A
machine that shares no memory between processes has none, and everything works without.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_cudal1.core.errors import SandboxError

__all__ = [
    "Arena",
    "Verbs",
    "arena_of",
    "lend",
    "lend_also",
    "open_arena",
    "return_to_first",
    "share",
    "share_at_once",
    "withdraw",
]

_ALIGNMENT = 512
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
Span = tuple[int, int]


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@dataclass(frozen=True)
class Verbs:
    """Copy (to an address, from an address, bytes), wait for the device, give the memory back."""

    copy: Callable[[int, int, int], None]
    wait: Callable[[], None]
    free: Callable[[], None]


class Arena:
    """`size_bytes` at `address` of a device. The verbs are the driver's."""

    def __init__(
        self, device: torch.device, address: int, size_bytes: int, verbs: Verbs, handle: str = ""
    ) -> None:
        self.device, self.size_bytes, self.handle = device, size_bytes, handle
        self._address, self._verbs = address, verbs

    def write(self, spans: Sequence[Span]) -> list[int] | None:
        """Copy (address, bytes) pairs in, from the beginning: the offset of each; None where they
        do not fit.

        It waits for what is queued on the device before, and until the copies are there. Raises
        SandboxError.
        """
        offsets, end = [], 0
        for _, size in spans:
            offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self.size_bytes:
            return None
        self._verbs.wait()
        for offset, (address, size) in zip(offsets, spans, strict=True):
            if size:
                self._verbs.copy(self._address + offset, address, size)
        self._verbs.wait()
        return offsets

    def read(self, offset: int, address: int, size: int) -> None:
        """Copy `size` bytes at `offset` to an address. Raises SandboxError for a place that is not
        inside.
        """
        if not 0 <= offset <= self.size_bytes - size:
            raise SandboxError(
                "reading tensors", f"{size} bytes at {offset} of {self.size_bytes} that are shared"
            )
        if size:
            self._verbs.copy(address, self._address + offset, size)

    def settle(self) -> None:
        """Wait until what was read is there. Raises SandboxError."""
        self._verbs.wait()

    def close(self) -> None:
        """Give it back."""
        self._verbs.free()


_LENT: dict[Path, Arena] = {}
_FIRST: dict[Path, Arena] = {}  # those that a larger one stands in for


def lend(folder: Path, arena: Arena) -> None:
    """From now on messages whose files would lie in `folder` go through `arena` where they can."""
    _LENT[folder] = arena


def lend_also(folder: Path, arena: Arena) -> None:
    """For the next messages this one in the place of what is lent already, until `return_to_first`."""
    _FIRST[folder] = _LENT[folder]
    _LENT[folder] = arena


def return_to_first(folder: Path) -> None:
    """Give the second one back. Nothing to do where there is none."""
    if folder in _FIRST:
        _LENT.pop(folder).close()
        _LENT[folder] = _FIRST.pop(folder)


def withdraw(folder: Path) -> None:
    """No longer; the memory is given back. Nothing to do where nothing was lent."""
    return_to_first(folder)
    arena = _LENT.pop(folder, None)
    if arena is not None:
        arena.close()


def arena_of(folder: Path) -> Arena | None:
    """What was lent for a folder."""
    return _LENT.get(folder)


def share(size_bytes: int, device: torch.device) -> Arena:
    """Allocate one that another process can open by `handle`. Raises SandboxError that says what
    the driver refused.
    """
    cuda = _driver(device)
    address, handle = ctypes.c_uint64(), _Handle()
    _ask(cuda, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
    try:
        _ask(cuda, "cuIpcGetMemHandle", ctypes.byref(handle), address)
    except SandboxError:
        _ask(cuda, "cuMemFree_v2", address)
        raise
    return _made(
        cuda,
        device,
        address,
        size_bytes,
        "cuMemFree_v2",
        ctypes.string_at(ctypes.byref(handle), _HANDLE_BYTES).hex(),
    )


def share_at_once(size_bytes: int, device: torch.device) -> Arena:
    """As `share`; where the driver has no such memory, what PyTorch keeps for later goes back to it
    first. Raises SandboxError.
    """
    try:
        return share(size_bytes, device)
    except SandboxError:
        torch.cuda.empty_cache()
        return share(size_bytes, device)


def open_arena(handle: str, size_bytes: int, device: torch.device) -> Arena:
    """The same memory in another process. Raises SandboxError."""
    cuda = _driver(device)
    address, given = ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(given), bytes.fromhex(handle), _HANDLE_BYTES)
    cuda.cuIpcOpenMemHandle_v2.argtypes = (
        ctypes.c_void_p,
        _Handle,
        ctypes.c_uint,
    )  # the handle goes by value
    _ask(cuda, "cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _LAZY_PEER_ACCESS)
    return _made(cuda, device, address, size_bytes, "cuIpcCloseMemHandle", handle)


def _made(
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
        getattr(cuda, free)(address)  # a context that has died has given it back already

    return Arena(device, address.value, size_bytes, Verbs(copy, wait, give_back), handle)


def _driver(device: torch.device) -> ctypes.CDLL:
    torch.cuda.synchronize(device)  # makes the device's context current in this thread
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise SandboxError("sharing memory of the GPU", str(error)) from error


def _ask(cuda: ctypes.CDLL, name: str, *given: object) -> None:
    status = getattr(cuda, name)(*given)
    if status:
        raise SandboxError("sharing memory of the GPU", f"{name} answered {status}")
