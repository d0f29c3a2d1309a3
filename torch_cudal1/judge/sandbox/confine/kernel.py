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
# The default, a C int, would cut off the upper half of a result.
_LIBC.syscall.restype = ctypes.c_long
# _LINUX_CAPABILITY_VERSION_3: capabilities as two 32-bit words each.
_CAP_VERSION = 0x20080522
_AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 0x8000, 0x1, 0x2
_NR_MOUNT_SETATTR = 442  # alike on every architecture, as all calls since Linux 5.1
_NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MNT_DETACH = 2


def check_result(result: int, call: str) -> int:
    """The result of a C call. Raises OSError with the call's errno where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def syscall(number: int, *args: object) -> int:
    """A system call by its number; arguments: integers, bytes, ctypes objects. Raises OSError."""
    _need_linux()
    return check_result(
        _LIBC.syscall(ctypes.c_long(number), *[_convert_argument(arg) for arg in args]),
        f"system call {number}",
    )


def prctl(option: int, *args: int) -> int:
    """prctl(2). Raises OSError."""
    _need_linux()
    # prctl is variadic, and some options (PR_SET_NO_NEW_PRIVS) fail unless every unused argument is
    # a 64-bit zero.
    arguments = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]]
    return check_result(_LIBC.prctl(option, *arguments), f"prctl({option})")


def unshare(flags: int) -> None:
    """unshare(2). Raises OSError."""
    _need_linux()
    check_result(_LIBC.unshare(flags), f"unshare({flags:#x})")


def capset(permitted: int, inheritable: int) -> None:
    """Set this thread's capabilities, as bits: `permitted` (also the effective ones) and
    `inheritable`. Raises OSError.
    """
    _need_linux()
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION, 0)
    # struct __user_cap_data_struct, twice: effective, permitted, inheritable; low halves first.
    words = [
        part
        for shift in (0, 32)
        for part in ((permitted >> shift) & 0xFFFFFFFF,) * 2
        + ((inheritable >> shift) & 0xFFFFFFFF,)
    ]
    data = (ctypes.c_uint32 * 6)(*words)
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
    # struct mount_attr: attributes to set, to clear, propagation, user namespace. mount(2) cannot
    # do this: it ignores MS_RDONLY for a new bind mount, and never changes the mounts below.
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    syscall(
        _NR_MOUNT_SETATTR,
        # AT_FDCWD; the target is absolute
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
    # The old root lands on top of the new one at the same place, and umount takes it off;
    # pivot_root(2) describes this way, which needs no folder for the old root.
    syscall(number, b".", b".")
    # Detached: the old root is busy, processes outside use it.
    check_result(_LIBC.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def _convert_argument(value: object) -> object:
    # ctypes passes a Python int as a 32-bit C int, and the kernel reads 64-bit registers.
    return ctypes.c_ulong(value & 0xFFFFFFFFFFFFFFFF) if isinstance(value, int) else value


def _need_linux() -> None:
    if not LINUX:
        raise OSError(errno.ENOSYS, f"Linux is needed, this is {sys.platform}")
