"""Gives a process new mount, pid, network and IPC namespaces, and a root that holds only the paths
that it may use.

Root needs CAP_SYS_ADMIN for it; other users need a kernel that lets them make user namespaces. The
kernel and its drivers stay shared.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch_cudal1.judge.sandbox.confine import kernel, process_identity
from torch_cudal1.judge.sandbox.confine.landlock import FilesystemAccess

__all__ = ["NAMES", "build_root", "enter_namespaces"]

NAMES = ("mount", "pid", "net", "ipc")
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    0x20000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV, _NOEXEC = (
    1 << 12,
    1 << 14,
    1 << 18,
    1 << 1,
    1 << 2,
    1 << 3,
)


def enter_namespaces() -> None:
    """Enter new IPC, network and pid namespaces; the last begins with the next fork. The mount
    namespace follows in `build_root`. The user id stays. Raises OSError.
    """
    # The supervisor calls this, so no mount namespace yet: it must keep its /proc, in which it sees
    # all processes of the worker.
    flags = _NEWIPC | _NEWPID | _NEWNET
    if process_identity.read_capabilities() >> process_identity.CAP_SYS_ADMIN & 1:
        kernel.unshare(flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    # Linux makes the user namespace first, and its capabilities permit the other namespaces.
    kernel.unshare(_NEWUSER | flags)
    # Since Linux 3.19 an unprivileged process may write gid_map only after this
    # (user_namespaces(7)).
    Path("/proc/self/setgroups").write_text("deny")
    # Without a map the user id would read as 65534. Each id is mapped to itself.
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def build_root(reach: FilesystemAccess, scratch: str) -> None:
    """Replace the root by an empty one with the paths of `reach` at their usual places and a fresh
    /proc. Only `reach.write` and `reach.devices` are writable.

    The first process of a new pid namespace calls it. Raises OSError.
    """
    kernel.unshare(_NEWNS)
    base = os.path.join(scratch, ".root")
    os.mkdir(base)
    # systemd makes / a shared mount, so mounts made here would appear on the host too.
    kernel.mount("", "/", "", _RECURSIVE | _PRIVATE)
    # It holds only mount points and links; every file is a bind mount.
    kernel.mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, "mode=755,size=16m")
    for folder in ("/tmp", "/dev", "/proc", "/dev/shm"):
        os.makedirs(base + folder, exist_ok=True)
    # A fresh /proc shows the processes of this pid namespace only.
    kernel.mount("proc", base + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    # A path inside another one comes with it.
    for path in _drop_nested(p for p in (*reach.read, *reach.look) if not p.startswith("/proc")):
        _show(base, path, read_only=True)
    # After the read-only ones, so that a writable folder inside a readable one is mounted over it.
    for path in (*reach.devices, *reach.write):
        if not path.startswith("/proc"):
            _show(base, path, read_only=False)
    # The new /dev lacks these links, which programs expect.
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ):
        os.symlink(target, f"{base}/dev/{name}")
    os.chdir(base)
    kernel.pivot_root()
    # pivot_root leaves the working folder at /.
    os.chdir(scratch)


def _drop_nested(paths: Iterable[str]) -> list[str]:
    """The paths that do not lie inside another of `paths`, shortest first."""
    chosen: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path == other or path.startswith(other + "/") for other in chosen):
            chosen.append(path)
    return chosen


def _show(base: str, path: str, *, read_only: bool) -> None:
    # FilesystemAccess may name paths that this machine lacks.
    if not os.path.exists(path):
        return
    target = base + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    # A bind mount needs a mount point of the same kind: a file for a file.
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    kernel.mount(path, target, "", _BIND | _RECURSIVE)
    if read_only:
        kernel.mount_read_only(target)
