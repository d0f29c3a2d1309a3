"""The few system calls that Python's standard library lacks, through the C library. Linux only;
elsewhere each raises OSError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

__all__ = [
    "LINUX",
    "capset",
    "check_result",
    "mount",
    "mount_read_only",
    "pivot_root",
    "prctl",
    "syscall",
    "unshare",
]

LINUX = sys.platform == "linux"
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_CAP_VERSION = 0x20080522
_AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 0x8000, 0x1, 0x2
_NR_MOUNT_SETATTR = 442  # alike on every architecture, as all calls since Linux 5.1
_NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MNT_DETACH = 2


def check_result(result: int, call: str) -> int:
    """The result of a C call, or the OSError that it left."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def syscall(number: int, *args: object) -> int:
    """A system call by its number; integers, bytes and ctypes objects as arguments. Raises OSError."""
    _need_linux()
    return check_result(
        _LIBC.syscall(ctypes.c_long(number), *[_argument(arg) for arg in args]),
        f"system call {number}",
    )


def prctl(option: int, *args: int) -> int:
    """prctl(2). Raises OSError."""
    _need_linux()
    arguments = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]]
    return check_result(_LIBC.prctl(option, *arguments), f"prctl({option})")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _need_linux()
    check_result(_LIBC.unshare(flags), f"unshare({flags:#x})")


def capset(permitted: int, inheritable: int) -> None:
    """Make these the permitted (and effective) and inheritable capabilities of this thread. Raises
    OSError.
    """
    _need_linux()
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION, 0)
    words = [
        part
        for shift in (0, 32)
        for part in ((permitted >> shift) & 0xFFFFFFFF,) * 2
        + ((inheritable >> shift) & 0xFFFFFFFF,)
    ]
    data = (ctypes.c_uint32 * 6)(*words)  # effective, permitted, inheritable; low halves first
    check_result(_LIBC.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2). Raises OSError that names the target."""
    _need_linux()
    result = _LIBC.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    check_result(result, f"mount {source or kind} on {target}")


def mount_read_only(target: str) -> None:
    """Make a mount and all below it read-only and without set-uid (mount_setattr, Linux 5.12).
    Raises OSError.
    """
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    syscall(
        _NR_MOUNT_SETATTR,
        -100,
        target.encode(),
        _AT_RECURSIVE,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )


def pivot_root() -> None:
    """Make the working folder, a mount point, the root, and forget the old root. Raises OSError."""
    number = _NR_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no pivot_root number for {os.uname().machine}")
    syscall(number, b".", b".")
    check_result(_LIBC.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def _argument(value: object) -> object:
    return ctypes.c_ulong(value & 0xFFFFFFFFFFFFFFFF) if isinstance(value, int) else value


def _need_linux() -> None:
    if not LINUX:
        raise OSError(errno.ENOSYS, f"Linux is needed, this is {sys.platform}")
