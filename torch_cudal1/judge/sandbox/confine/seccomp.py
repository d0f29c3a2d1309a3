"""Assembles and installs a system-call filter that a process cannot remove (seccomp, x86-64 only).

The filter refuses the listed calls and allows all others, so programs run unchanged; a candidate
has no honest use for the listed calls. There are two filters: `build` from the start, which lets
compilers run, and on top of it `run`, before the candidate is loaded, which lets only threads be
started. A filter sees the numbers of a call, not the memory behind its pointers: it cannot tell
files or socket paths apart.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch_cudal1.judge.sandbox.confine import kernel

__all__ = [
    "DENIED",
    "Phase",
    "SyscallRule",
    "assemble_filter",
    "digest_filter",
    "install_filter",
    "is_supported",
    "list_rules",
]

Phase = Literal["build", "run"]
Instruction: TypeAlias = tuple[int, int, int, int]
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_ARCH_X86_64, _X32 = 0xC000003E, 0x40000000
_NR_SECCOMP, _SET_FILTER, _ALL_THREADS = 317, 1, 1
_PR_SET_NO_NEW_PRIVS = 38
# CLONE_NEWTIME to CLONE_NEWNET.
_NAMESPACES = 0x7E020080
_CLONE_THREAD = 0x10000
_AF_UNIX = 1
# Set in SOCK_DGRAM (2) and SOCK_RAW (3), not in SOCK_STREAM (1) and SOCK_SEQPACKET (5).
_DATAGRAM_BIT = 2

# fmt: off
# x86-64 numbers of the calls that are refused in every phase.
DENIED = {
    # other processes
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "process_mrelease": 448,
    "kcmp": 312, "pidfd_getfd": 438, "move_pages": 279, "migrate_pages": 256, "pidfd_send_signal": 424,
    # the kernel's own machinery, large and seldom needed: a history of holes
    "bpf": 321, "userfaultfd": 323, "perf_event_open": 298, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "add_key": 248, "request_key": 249, "keyctl": 250, "fanotify_init": 300, "lookup_dcookie": 212, "nfsservctl": 180,
    "modify_ldt": 154, "personality": 135, "syslog": 103, "quotactl": 179, "quotactl_fd": 443, "acct": 163,
    # mounts and namespaces
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "mount_setattr": 442,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "name_to_handle_at": 303, "open_by_handle_at": 304,
    # the machine
    "reboot": 169, "swapon": 167, "swapoff": 168, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
    "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "vhangup": 153,
    # memory and queues shared by name, which Landlock does not see
    "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "mq_open": 240,
    # how other processes are scheduled
    "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314, "ioprio_set": 251, "setpriority": 141,
}
# fmt: on


@dataclass(frozen=True)
class SyscallRule:
    """Refuse call `number` with `error`, unless the lower 32 bits of argument `arg` pass `test`.

    - "equal": they equal one of `values`. "any": they share a bit with values[0]. "none": they
      share no bit with values[0].
    - "null": all 64 bits are 0. "never": no argument passes.
    """

    number: int
    error: int = errno.EPERM
    arg: int = 0
    test: Literal["never", "equal", "any", "none", "null"] = "never"
    values: tuple[int, ...] = ()


def is_supported() -> bool:
    """Whether this machine is x86-64 Linux, whose call numbers are listed above."""
    return kernel.LINUX and platform.machine() == "x86_64"


def list_rules(phase: Phase, *, own: bool, pid: int = 0) -> tuple[SyscallRule, ...]:
    """The rules that a phase adds.

    `own`: the child runs own code, which may use sockets with a path. `pid`: the only process that
    the run phase may signal: itself.
    """
    if phase == "build":
        own_rules = (
            *(SyscallRule(number) for number in DENIED.values()),
            # socket: no IP, no netlink. Landlock covers TCP only from version 4 on, and UDP not at
            # all.
            SyscallRule(41, errno.EACCES, 0, "equal", (_AF_UNIX,)),
            SyscallRule(53, errno.EACCES, 0, "equal", (_AF_UNIX,)),  # socketpair
            SyscallRule(56, errno.EPERM, 0, "none", (_NAMESPACES,)),  # clone
            # clone3: its flags are in memory, where a filter cannot read them. On ENOSYS, C
            # libraries use clone.
            SyscallRule(435, errno.ENOSYS),
            # prlimit64, on itself: the C library's setrlimit and getrlimit use it
            SyscallRule(302, errno.EPERM, 0, "equal", (0,)),
            # sched_setaffinity, on the calling thread
            SyscallRule(203, errno.EPERM, 0, "equal", (0,)),
        )
        # A socket with a path leads past Landlock to daemons, such as a container runtime. Foreign
        # code may connect to none.
        foreign_rules = (
            SyscallRule(42, errno.EACCES),  # connect
            # socket: a datagram socket sends without connecting
            SyscallRule(41, errno.EACCES, 1, "none", (_DATAGRAM_BIT,)),
        )
        return own_rules if own else (*own_rules, *foreign_rules)
    return (
        # fork, vfork, execve, execveat
        *(SyscallRule(number) for number in (57, 58, 59, 322)),
        # clone, for threads only
        SyscallRule(56, errno.EPERM, 0, "any", (_CLONE_THREAD,)),
        # kill and tgkill, of itself only: abort() needs them. Landlock covers signals only from
        # version 6 on.
        SyscallRule(62, errno.EPERM, 0, "equal", (pid,)),
        SyscallRule(234, errno.EPERM, 0, "equal", (pid,)),
        # tkill names no process, so it could reach threads of others; rt_sigqueueinfo and
        # rt_tgsigqueueinfo have no honest use
        *(SyscallRule(number) for number in (200, 129, 297)),
    )


def assemble_filter(syscall_rules: tuple[SyscallRule, ...]) -> tuple[Instruction, ...]:
    """The filter as classic BPF: code, jump if true, jump if false, constant."""
    code: list[Instruction] = [
        # Offset 4 of struct seccomp_data: the architecture. Under another one, such as 32-bit x86,
        # the same numbers are other calls.
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, _ARCH_X86_64),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        # Offset 0: the number. x32 has its own numbers for the same calls, which no rule lists.
        (_LOAD, 0, 0, 0),
        (_JUMP_ABOVE, 0, 1, _X32),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for rule in syscall_rules:
        body = _assemble_rule(rule)
        code += [(_JUMP_EQUAL, 0, len(body), rule.number), *body]
    return (*code, (_RETURN, 0, 0, _ALLOW))


def digest_filter(syscall_rules: tuple[SyscallRule, ...]) -> str:
    """The sha256 of a filter, as hex; entries store it as evidence."""
    return hashlib.sha256(_pack(assemble_filter(syscall_rules))).hexdigest()


def install_filter(syscall_rules: tuple[SyscallRule, ...], *, all_threads: bool) -> None:
    """Install the filter for this thread, or for all threads of the process. Raises OSError; then
    no filter is installed.
    """
    if not is_supported():
        raise OSError(
            errno.ENOSYS, f"the filter is written for x86-64 Linux, this is {platform.machine()}"
        )
    packed = _pack(assemble_filter(syscall_rules))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    # struct sock_fprog: number of 8-byte instructions, padding, pointer.
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(packed) // 8, ctypes.addressof(buffer))
    )
    # Linux requires it for a filter, unless the process has CAP_SYS_ADMIN.
    kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    thread = kernel.syscall(_NR_SECCOMP, _SET_FILTER, _ALL_THREADS if all_threads else 0, program)
    # SECCOMP_FILTER_FLAG_TSYNC returns the first thread that could not be filtered.
    if thread:
        raise OSError(
            errno.EAGAIN, f"thread {thread} of process {os.getpid()} could not be filtered"
        )


def _assemble_rule(rule: SyscallRule) -> list[Instruction]:
    """Instructions for a call with the rule's number: refuse it, or go on to the next rule."""
    # The tests replace the number in the accumulator, and the next rule compares it: load it again.
    # Offsets of the arguments: 16 + 8 * index, the low half first (little endian).
    refuse, hand_on = (_RETURN, 0, 0, _ERRNO | rule.error), (_LOAD, 0, 0, 0)
    low, high = (_LOAD, 0, 0, 16 + 8 * rule.arg), (_LOAD, 0, 0, 20 + 8 * rule.arg)
    match rule.test:
        case "never":
            return [refuse]
        case "equal":
            tests = [
                (_JUMP_EQUAL, len(rule.values) - index, 0, value)
                for index, value in enumerate(rule.values)
            ]
            return [low, *tests, refuse, hand_on]
        case "any":
            return [low, (_JUMP_SET, 1, 0, rule.values[0]), refuse, hand_on]
        case "none":
            return [low, (_JUMP_SET, 0, 1, rule.values[0]), refuse, hand_on]
        case "null":
            return [low, (_JUMP_EQUAL, 0, 2, 0), high, (_JUMP_EQUAL, 1, 0, 0), refuse, hand_on]


def _pack(code: tuple[Instruction, ...]) -> bytes:
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
