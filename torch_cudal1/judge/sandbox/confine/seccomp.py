"""A system-call filter, assembled here and laid on a process for good (seccomp, x86-64 only).

Everything is allowed but what is listed, so programs run as they are; the list holds what a
candidate has no honest use for. Two filters lie on top of each other: `build` from the start, when
compilers must run, and `run` before the first candidate byte, when nothing but threads may be
started. It sees numbers, not what pointers lead to: which file, which socket path it cannot tell.
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
_NAMESPACES = 0x7E020080  # CLONE_NEWTIME .. CLONE_NEWNET
_CLONE_THREAD = 0x10000
_AF_UNIX = 1
_DATAGRAM_BIT = 2  # of SOCK_DGRAM and SOCK_RAW, not of SOCK_STREAM and SOCK_SEQPACKET

# fmt: off
DENIED = {  # x86-64 numbers of what is refused in every phase
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
    """Refuse call `number` with `error`, unless its argument `arg` (lower half) is right.

    `test` says what is right: "equal": one of `values`; "any": has a bit of values[0]; "none": has
    none of them; "null": is 0 in both halves; "never": nothing is.
    """

    number: int
    error: int = errno.EPERM
    arg: int = 0
    test: Literal["never", "equal", "any", "none", "null"] = "never"
    values: tuple[int, ...] = ()


def is_supported() -> bool:
    """Whether the numbers above are this machine's."""
    return kernel.LINUX and platform.machine() == "x86_64"


def list_rules(phase: Phase, *, own: bool, pid: int = 0) -> tuple[SyscallRule, ...]:
    """What a phase adds. `own`: code of ours, which may talk over sockets with a path. `pid`: the
    only process "run" may signal.
    """
    if phase == "build":
        own_rules = (
            *(SyscallRule(number) for number in DENIED.values()),
            SyscallRule(41, errno.EACCES, 0, "equal", (_AF_UNIX,)),  # socket
            SyscallRule(53, errno.EACCES, 0, "equal", (_AF_UNIX,)),  # socketpair
            SyscallRule(56, errno.EPERM, 0, "none", (_NAMESPACES,)),  # clone
            SyscallRule(
                435, errno.ENOSYS
            ),  # clone3 hides its flags in memory; C libraries then use clone
            SyscallRule(302, errno.EPERM, 0, "equal", (0,)),  # prlimit64, on itself
            SyscallRule(
                203, errno.EPERM, 0, "equal", (0,)
            ),  # sched_setaffinity, on the calling thread
        )
        # A socket with a path leads past Landlock to daemons (a container runtime's, for one):
        # strangers connect to nothing.
        foreign_rules = (
            SyscallRule(42, errno.EACCES),  # connect
            SyscallRule(
                41, errno.EACCES, 1, "none", (_DATAGRAM_BIT,)
            ),  # a datagram socket sends without connecting
        )
        return own_rules if own else (*own_rules, *foreign_rules)
    return (
        *(SyscallRule(number) for number in (57, 58, 59, 322)),  # fork, vfork, execve, execveat
        SyscallRule(56, errno.EPERM, 0, "any", (_CLONE_THREAD,)),
        SyscallRule(62, errno.EPERM, 0, "equal", (pid,)),  # kill
        SyscallRule(234, errno.EPERM, 0, "equal", (pid,)),  # tgkill
        *(
            SyscallRule(number) for number in (200, 129, 297)
        ),  # tkill, rt_sigqueueinfo, rt_tgsigqueueinfo
    )


def assemble_filter(syscall_rules: tuple[SyscallRule, ...]) -> tuple[Instruction, ...]:
    """The filter as classic BPF: code, jump if true, jump if false, constant."""
    code: list[Instruction] = [
        (_LOAD, 0, 0, 4),  # architecture
        (_JUMP_EQUAL, 1, 0, _ARCH_X86_64),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_LOAD, 0, 0, 0),  # number
        (_JUMP_ABOVE, 0, 1, _X32),  # the x32 numbers are a second way in
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for rule in syscall_rules:
        body = _body(rule)
        code += [(_JUMP_EQUAL, 0, len(body), rule.number), *body]
    return (*code, (_RETURN, 0, 0, _ALLOW))


def digest_filter(syscall_rules: tuple[SyscallRule, ...]) -> str:
    """The sha256 of a filter."""
    return hashlib.sha256(_packed(assemble_filter(syscall_rules))).hexdigest()


def install_filter(syscall_rules: tuple[SyscallRule, ...], *, all_threads: bool) -> None:
    """Lay the filter on this thread, or on all of the process. Raises OSError; then nothing is
    filtered.
    """
    if not is_supported():
        raise OSError(
            errno.ENOSYS, f"the filter is written for x86-64 Linux, this is {platform.machine()}"
        )
    packed = _packed(assemble_filter(syscall_rules))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(packed) // 8, ctypes.addressof(buffer))
    )
    kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    thread = kernel.syscall(_NR_SECCOMP, _SET_FILTER, _ALL_THREADS if all_threads else 0, program)
    if thread:
        raise OSError(
            errno.EAGAIN, f"thread {thread} of process {os.getpid()} could not be filtered"
        )


def _body(rule: SyscallRule) -> list[Instruction]:
    """What is done with a call of the rule's number: refused, or handed on to the next rule with
    the number loaded again.
    """
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


def _packed(code: tuple[Instruction, ...]) -> bytes:
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
