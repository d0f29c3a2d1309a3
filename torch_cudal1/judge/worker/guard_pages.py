"""Places tensors at the edge of mapped memory, where the hardware refuses any access beyond them.

A copy of a tensor lies at the end, or at the start, of its own pages; the addresses on both sides
are reserved and not mapped. On the host that is `mmap` with guard pages, on a GPU the driver's
virtual memory management. A process that reads or writes there ends (SIGSEGV); on a GPU it loses
its CUDA context (illegal address). Only the child that runs the candidate is affected.

Two kinds of access go unnoticed: to the up to 15 bytes between a tensor and the end of its pages,
as tensors start at multiples of 16 (`redzone_tensors` covers those), and beyond the reserved addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from torch_cudal1.core.errors import DriverError
from torch_cudal1.device.cuda.driver import ALIGNMENT, Driver, open_driver
from torch_cudal1.judge.wire.channel import storage_extent

if TYPE_CHECKING:
    from torch_cudal1.judge.worker.session import Session

__all__ = ["HANDLERS", "OUT_OF_MEMORY", "SIDES", "Side", "copy_to_edge"]

Side: TypeAlias = Literal["end", "start"]
SIDES: tuple[Side, ...] = ("end", "start")
_PAGE = mmap.PAGESIZE
# Reserved on either side: only addresses, but an address-space limit counts them on the host.
_HOST_MARGIN_BYTES, _GPU_MARGIN_BYTES = 16 << 20, 1 << 30
# MAP_NORESERVE of Linux: untouched pages do not count as committed memory.
_NORESERVE = 0x4000
_PROT_NONE = 0
# From cuda.h: CUmemAllocationType, CUmemLocationType, CUmemAllocationGranularity_flags,
# CUmemAccess_flags
_PINNED, _ON_DEVICE, _MINIMUM, _READ, _READ_AND_WRITE = 1, 1, 0, 1, 3
# Part of the message of a DriverError where the GPU is full.
OUT_OF_MEMORY = "cuMemCreate answered CUDA_ERROR_OUT_OF_MEMORY"
# Bound before any candidate, which may patch them.
_map, _frombuffer, _as_tensor = mmap.mmap, torch.frombuffer, torch.as_tensor
_empty_cache = torch.cuda.empty_cache


def copy_to_edge(tensor: torch.Tensor, side: Side, *, read_only: bool = False) -> torch.Tensor:
    """A copy of `tensor`, with its strides, that ends where mapped memory ends, or starts where it
    starts. An empty tensor is returned as it is. `read_only`: writing to it is fatal, too.

    Raises OSError, on a GPU DriverError, where such memory cannot be had.
    """
    extent = storage_extent(tensor.shape, tensor.stride())
    if not extent:
        return tensor
    size = extent * tensor.element_size()
    bits = tensor.detach().as_strided((extent,), (1,)).view(torch.uint8)
    if tensor.device.type == "cpu":
        pages = _map_host_pages(size, side)
        pages.copy_(bits)
        if read_only:
            first = pages.data_ptr() // _PAGE * _PAGE
            _protect(first, _round_up(pages.data_ptr() + size - first, _PAGE), mmap.PROT_READ)
    else:
        reserved = _map_gpu_pages(size, side, tensor.device)
        pages = _as_tensor(reserved, device=tensor.device)
        pages.copy_(bits)
        if read_only:
            reserved.protect()
    return (
        pages.view(tensor.dtype)
        .as_strided(tensor.shape, tensor.stride())
        .requires_grad_(tensor.requires_grad)
    )


def _find_offset(size: int, mapped: int, side: Side) -> int:
    """The offset in `mapped` bytes at which a tensor of `size` bytes begins."""
    # Aligned as tensors are, since kernels may load vectors; so up to 15 bytes stay behind the end.
    return 0 if side == "start" else (mapped - size) // ALIGNMENT * ALIGNMENT


def _round_up(size: int, granule: int) -> int:
    return -(-size // granule) * granule


def _map_host_pages(size: int, side: Side) -> torch.Tensor:
    """A uint8 tensor on the host. It owns the mapping, which is freed with it."""
    mapped = _round_up(size, _PAGE)
    memory = _map(
        -1,
        mapped + 2 * _HOST_MARGIN_BYTES,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE,
    )
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for start in (first, first + _HOST_MARGIN_BYTES + mapped):
        # PROT_NONE: the CPU raises SIGSEGV at any access.
        _protect(start, _HOST_MARGIN_BYTES, _PROT_NONE)
    return _frombuffer(
        memory,
        dtype=torch.uint8,
        count=size,
        offset=_HOST_MARGIN_BYTES + _find_offset(size, mapped, side),
    )


def _protect(start: int, size: int, rights: int) -> None:
    if _open_libc().mprotect(ctypes.c_void_p(start), ctypes.c_size_t(size), rights):
        code = ctypes.get_errno()
        raise OSError(code, f"mprotect of a guard page: {os.strerror(code)}")


@functools.cache
def _open_libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _map_gpu_pages(size: int, side: Side, device: torch.device) -> _ReservedPages:
    index = torch.cuda.current_device() if device.index is None else device.index
    driver = open_driver()
    place = _Location(_ON_DEVICE, index)
    try:
        return _ReservedPages(driver, driver.retain_context(index), place, size, side)
    except DriverError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        # PyTorch keeps freed memory, which the driver cannot use.
        _empty_cache()
        return _ReservedPages(driver, driver.retain_context(index), place, size, side)


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: 32 bytes."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _ReservedPages:
    """Reserved GPU addresses of which only the middle is mapped. `size` bytes of the middle are
    offered by CUDA's array interface, through which a tensor keeps this object alive.
    """

    def __init__(
        self, driver: Driver, context: ctypes.c_void_p, place: _Location, size: int, side: Side
    ) -> None:
        self._driver, self._context = driver, context
        # Filled step by step: Python calls __del__ also where a later step of this constructor
        # raises.
        self._undo: list[Callable[[], None]] = []
        properties, granule = _Properties(kind=_PINNED, location=place), ctypes.c_size_t()
        base, memory = ctypes.c_uint64(), ctypes.c_uint64()
        with driver.make_current(self._context):
            call, by, wide = driver.call, ctypes.byref, ctypes.c_size_t
            call(
                "cuMemGetAllocationGranularity", by(granule), by(properties), ctypes.c_int(_MINIMUM)
            )
            # The driver maps and reserves whole granules only.
            mapped = _round_up(size, granule.value)
            beyond = _round_up(_GPU_MARGIN_BYTES, granule.value)
            reserved = mapped + 2 * beyond
            call(
                "cuMemAddressReserve",
                by(base),
                wide(reserved),
                wide(0),
                ctypes.c_uint64(0),
                ctypes.c_uint64(0),
            )
            self._undo.append(lambda: call("cuMemAddressFree", base, wide(reserved)))
            first = ctypes.c_uint64(base.value + beyond)
            call("cuMemCreate", by(memory), wide(mapped), by(properties), ctypes.c_uint64(0))
            self._undo.append(lambda: call("cuMemRelease", memory))
            call("cuMemMap", first, wide(mapped), wide(0), memory, ctypes.c_uint64(0))
            self._undo.append(lambda: call("cuMemUnmap", first, wide(mapped)))
            self._allow = lambda rights: call(
                "cuMemSetAccess", first, wide(mapped), by(_Access(place, rights)), wide(1)
            )
            self._allow(_READ_AND_WRITE)
        address = first.value + _find_offset(size, mapped, side)
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    def protect(self) -> None:
        """From here on a write to the pages is an illegal access."""
        with self._driver.make_current(self._context):
            # What fills the pages has been queued and may not have run.
            self._driver.call("cuCtxSynchronize")
            self._allow(_READ)

    def __del__(self) -> None:
        """Unmap, release and free, in the reverse order."""
        # After an illegal access every call of the driver fails.
        with contextlib.suppress(DriverError), self._driver.make_current(self._context):
            # A kernel may still use the pages.
            self._driver.call("cuCtxSynchronize")
            while self._undo:
                self._undo.pop()()


def _move_to_edge(session: Session, request: Mapping[str, Any]) -> dict[str, Any]:
    """Make a copy of an input set with the tensors at `positions` at the edge of their pages, which
    may be `read_only`.
    """
    tensors, chosen = session.sets[request["inputs"]], set(request["positions"])
    side: Side = request["side"]
    session.sets[request["name"]] = [
        copy_to_edge(t, side, read_only=bool(request.get("read_only"))) if i in chosen else t
        for i, t in enumerate(tensors)
    ]
    return {}


HANDLERS: dict[str, Callable[[Session, Mapping[str, Any]], dict[str, Any]]] = {
    "edge": _move_to_edge
}
