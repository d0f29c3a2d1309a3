"""Landlock: rules on files, TCP ports, abstract sockets and signals that a process lays on itself
and cannot lift (Linux 5.13).

Which parts exist depends on the version of its interface, see `find_version`. It does not govern files
that are open already, memory mappings, sockets with a path, UDP, or system calls without a path;
`seccomp` takes what it can of those. Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from torch_cudal1.judge.sandbox.confine import kernel

__all__ = ["FilesystemAccess", "find_version", "restrict"]

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = (
    1 << 0,
    1 << 1,
    1 << 2,
    1 << 3,
    1 << 14,
    1 << 15,
)
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_FS_RIGHTS = {
    1: 13,
    2: 14,
    3: 15,
    4: 15,
    5: 16,
}  # interface version -> how many file rights it knows
_TCP = 0b11  # bind, connect: version 4
_SCOPES = 0b11  # abstract sockets, signals: version 6


@dataclass(frozen=True)
class FilesystemAccess:
    """Paths a confined process may use. A folder stands for all below it; what does not exist is
    passed over.

    - read: read and execute. look: list folders, read no file. write: everything but execute,
      devices apart.
    - devices: device files and folders of them, read, written and asked by ioctl.
    """

    read: tuple[str, ...] = ()
    look: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


def find_version() -> int:
    """The version of Landlock's interface here; 0: the kernel has none, or it is switched off."""
    try:
        return kernel.syscall(_CREATE, 0, 0, 1)
    except OSError:
        return 0


def restrict(reach: FilesystemAccess) -> int:
    """Restrict this thread, and whatever it starts from now on, to `reach`; the interface version
    used. Raises OSError.
    """
    abi = kernel.syscall(_CREATE, 0, 0, 1)
    all_rights = (1 << _FS_RIGHTS[min(abi, 5)]) - 1
    attributes = struct.pack("QQQ", all_rights, _TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = kernel.syscall(_CREATE, attributes, size, 0)
    try:
        _allow(ruleset, reach.read, all_rights & (_EXECUTE | _READ_FILE | _READ_DIR))
        _allow(ruleset, reach.look, all_rights & _READ_DIR)
        _allow(
            ruleset, reach.write, all_rights & ~(_EXECUTE | _MAKE_CHAR | _MAKE_BLOCK | _IOCTL_DEV)
        )
        _allow(
            ruleset, reach.devices, all_rights & (_READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL_DEV)
        )
        kernel.syscall(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _allow(ruleset: int, paths: Sequence[str], rights: int) -> None:
    for path in paths:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # what is not there, or not ours to enter, is granted to nobody
        try:
            applicable = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
            if applicable:
                rule = ctypes.create_string_buffer(struct.pack("<Qi", applicable, fd), 12)
                kernel.syscall(_ADD_RULE, ruleset, 1, rule, 0)
        finally:
            os.close(fd)
