"""Landlock: a process restricts its own use of files, TCP ports, abstract sockets and signals, and
cannot undo it (Linux 5.13).

The version of the interface decides which of these it covers, see `find_version`. It does not cover
files that are open already, memory mappings, sockets with a path, UDP, or system calls without a
path; `seccomp` refuses some of these. Source:
https://docs.kernel.org/userspace-api/landlock.html
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
# The kernel refuses a rule (EINVAL) that gives a file a right that only folders have.
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
# Interface version -> how many file rights it knows. A right that the kernel does not know makes
# landlock_create_ruleset fail with EINVAL.
_FS_RIGHTS = {
    1: 13,
    2: 14,
    3: 15,
    4: 15,
    5: 16,
}
# LANDLOCK_ACCESS_NET_BIND_TCP and _CONNECT_TCP: interface version 4.
_TCP = 0b11
# LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET and _SIGNAL: interface version 6.
_SCOPES = 0b11


@dataclass(frozen=True)
class FilesystemAccess:
    """Paths that a confined process may use. A folder includes everything below it; paths that do
    not exist are skipped.

    - read: read and execute. look: list folders, but read no file.
    - write: everything but execute, make device files, and ioctl on devices.
    - devices: device files, and folders of them: read, write, ioctl.
    """

    read: tuple[str, ...] = ()
    look: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


def find_version() -> int:
    """The version of Landlock's interface; 0 where the kernel lacks Landlock or has it off."""
    try:
        # LANDLOCK_CREATE_RULESET_VERSION: no ruleset, the version.
        return kernel.syscall(_CREATE, 0, 0, 1)
    except OSError:
        return 0


def restrict(reach: FilesystemAccess) -> int:
    """Restrict this thread, and every thread and process that it starts from now on, to `reach`.

    Returns the interface version used. Raises OSError.
    """
    # Raises where Landlock is missing: a child that expects it must not start without.
    abi = kernel.syscall(_CREATE, 0, 0, 1)
    all_rights = (1 << _FS_RIGHTS[min(abi, 5)]) - 1
    attributes = struct.pack("QQQ", all_rights, _TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    # struct landlock_ruleset_attr has grown: version 4 added the ports, version 6 the scopes.
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = kernel.syscall(_CREATE, attributes, size, 0)
    try:
        _allow(ruleset, reach.read, all_rights & (_EXECUTE | _READ_FILE | _READ_DIR))
        _allow(ruleset, reach.look, all_rights & _READ_DIR)
        # No execution: a child runs no program that it wrote. No device files, no ioctl: those go
        # by the list of devices.
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
            # O_PATH needs no right to read the file, and does not open a device.
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        # A path that is missing, or closed to this user, gets no rule: the child is refused there.
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        try:
            applicable = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
            if applicable:
                # struct landlock_path_beneath_attr is packed: 12 bytes, no padding.
                rule = ctypes.create_string_buffer(struct.pack("<Qi", applicable, fd), 12)
                kernel.syscall(_ADD_RULE, ruleset, 1, rule, 0)
        finally:
            os.close(fd)
