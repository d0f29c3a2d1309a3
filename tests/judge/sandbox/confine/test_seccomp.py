"""The filter of system calls refuses exactly what it lists."""

from __future__ import annotations

import errno
import signal

import pytest

from torch_cudal1.judge.sandbox.confine import seccomp

ALLOWED = 0x7FFF0000

UNIX, INET = 1, 2

STREAM, DATAGRAM, CLOEXEC = 1, 2, 0x80000

THREAD, NEWUSER = 0x3D0F00, 0x10000000 | signal.SIGCHLD

ME, OTHER = 4711, 1

CALLS = [  # phase, trust, number, arguments, what comes of it (0: allowed)
    ("build", "own", 0, (), 0),  # read
    ("build", "own", 101, (), errno.EPERM),  # ptrace
    ("build", "own", 0x40000000, (), errno.ENOSYS),  # the x32 way to read
    ("build", "own", 41, (UNIX, STREAM | CLOEXEC), 0),
    ("build", "own", 41, (UNIX, DATAGRAM), 0),
    ("build", "own", 41, (INET, STREAM), errno.EACCES),
    ("build", "own", 41, (16, 3), errno.EACCES),  # netlink
    ("build", "own", 42, (), 0),  # connect
    ("build", "foreign", 42, (), errno.EACCES),
    ("build", "foreign", 41, (UNIX, STREAM | CLOEXEC), 0),
    ("build", "foreign", 41, (UNIX, 5), 0),
    ("build", "foreign", 41, (UNIX, DATAGRAM | CLOEXEC), errno.EACCES),
    ("build", "foreign", 59, (), 0),  # execve
    ("build", "foreign", 57, (), 0),  # fork
    ("build", "foreign", 56, (THREAD,), 0),  # clone
    ("build", "foreign", 56, (signal.SIGCHLD,), 0),
    ("build", "foreign", 56, (NEWUSER,), errno.EPERM),
    ("build", "foreign", 435, (), errno.ENOSYS),  # clone3
    ("build", "foreign", 302, (0,), 0),  # prlimit64
    ("build", "foreign", 302, (OTHER,), errno.EPERM),
    ("build", "foreign", 272, (), errno.EPERM),  # unshare
    ("run", "foreign", 59, (), errno.EPERM),
    ("run", "foreign", 322, (), errno.EPERM),  # execveat
    ("run", "foreign", 57, (), errno.EPERM),
    ("run", "foreign", 56, (THREAD,), 0),
    ("run", "foreign", 56, (signal.SIGCHLD,), errno.EPERM),
    ("run", "foreign", 62, (ME,), 0),  # kill
    ("run", "foreign", 62, (OTHER,), errno.EPERM),
    ("run", "foreign", 62, (-1,), errno.EPERM),
    ("run", "foreign", 234, (ME,), 0),  # tgkill
    ("run", "foreign", 1, (), 0),  # write
]


def interpret_filter(
    code: tuple[seccomp.Instruction, ...],
    number: int,
    args: tuple[int, ...],
    arch: int = 0xC000003E,
) -> int:
    """What classic BPF makes of a call: 0 allowed, else the error number. Written from the kernel's
    description of the machine.
    """
    words = {0: number & 0xFFFFFFFF, 4: arch}
    for index in range(6):
        value = args[index] if index < len(args) else 0
        words |= {16 + 8 * index: value & 0xFFFFFFFF, 20 + 8 * index: (value >> 32) & 0xFFFFFFFF}
    next_index = accumulator = 0
    while True:
        op, jump_true, jump_false, constant = code[next_index]
        next_index += 1
        match op:
            case 0x20:
                accumulator = words[constant]
            case 0x15 | 0x35 | 0x45:
                holds = {
                    0x15: accumulator == constant,
                    0x35: accumulator >= constant,
                    0x45: bool(accumulator & constant),
                }[op]
                next_index += jump_true if holds else jump_false
            case 0x06:
                return 0 if constant == ALLOWED else constant & 0xFFFF
            case _:
                raise AssertionError(f"no such instruction {op:#x}")


@pytest.mark.parametrize(("phase", "trust", "number", "args", "expected"), CALLS)
def test_the_filter_refuses_what_it_lists_and_nothing_else(
    phase: seccomp.Phase, trust: str, number: int, args: tuple[int, ...], expected: int
) -> None:
    is_own = trust == "own"
    filters = [seccomp.list_rules("build", own=is_own)] + (
        [seccomp.list_rules("run", own=is_own, pid=ME)] if phase == "run" else []
    )
    outcomes = [interpret_filter(seccomp.assemble_filter(rules), number, args) for rules in filters]
    assert (
        max(outcomes) == expected
    )  # the strictest of the filters that lie on top of each other decides


def test_a_call_by_another_architectures_numbers_is_refused() -> None:
    assert (
        interpret_filter(
            seccomp.assemble_filter(seccomp.list_rules("build", own=True)), 0, (), arch=0x40000003
        )
        == errno.ENOSYS
    )


def test_a_filter_has_room_for_its_jumps() -> None:
    for phase in ("build", "run"):
        code = seccomp.assemble_filter(seccomp.list_rules(phase, own=False))
        assert len(code) < 4096
        assert all(
            0 <= jump_true < 256 and 0 <= jump_false < 256 for _, jump_true, jump_false, _ in code
        )


def test_the_digest_differs_between_filters_and_not_between_processes() -> None:
    digests = {
        seccomp.digest_filter(seccomp.list_rules(phase, own=is_own))
        for phase in ("build", "run")
        for is_own in (True, False)
    }
    assert len(digests) == 3  # what "run" adds is alike for both
    assert seccomp.digest_filter(seccomp.list_rules("run", own=True)) != seccomp.digest_filter(
        seccomp.list_rules("run", own=True, pid=ME)
    )
