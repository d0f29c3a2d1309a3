"""A world of its own for a process: mounts, process numbers, network and IPC namespaces, and a root
made of what it may reach.

Root needs CAP_SYS_ADMIN for it, anybody else a kernel that lets users make user namespaces. Kernel
and drivers stay shared.
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
    """Leave the shared namespaces but that of mounts; that of pids begins with the next fork. The
    user stays. Raises OSError.
    """
    flags = (
        _NEWIPC | _NEWPID | _NEWNET
    )  # mounts come later: who watches must keep seeing all processes
    if process_identity.read_capabilities() >> process_identity.CAP_SYS_ADMIN & 1:
        kernel.unshare(flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def build_root(reach: FilesystemAccess, scratch: str) -> None:
    """Replace the root by an empty one that holds `reach` at its own places, read-only but for
    `write`, and a fresh /proc.

    For the first process of a new pid namespace. Raises OSError.
    """
    kernel.unshare(_NEWNS)
    base = os.path.join(scratch, ".root")
    os.mkdir(base)
    kernel.mount("", "/", "", _RECURSIVE | _PRIVATE)
    kernel.mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, "mode=755,size=16m")
    for folder in ("/tmp", "/dev", "/proc", "/dev/shm"):
        os.makedirs(base + folder, exist_ok=True)
    kernel.mount("proc", base + "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    for path in _outermost(p for p in (*reach.read, *reach.look) if not p.startswith("/proc")):
        _show(base, path, read_only=True)
    for path in (*reach.devices, *reach.write):
        if not path.startswith("/proc"):
            _show(base, path, read_only=False)
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ):
        os.symlink(target, f"{base}/dev/{name}")
    os.chdir(base)
    kernel.pivot_root()
    os.chdir(scratch)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Paths that lie in no other of them, shortest first."""
    chosen: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path == other or path.startswith(other + "/") for other in chosen):
            chosen.append(path)
    return chosen


def _show(base: str, path: str, *, read_only: bool) -> None:
    if not os.path.exists(path):
        return
    target = base + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    kernel.mount(path, target, "", _BIND | _RECURSIVE)
    if read_only:
        kernel.mount_read_only(target)
