"""System calls by number and by name return their results, and failures are errors with a number."""

from __future__ import annotations

import errno
import os
import platform
import sys

import pytest

from torch_cudal1.judge.sandbox.confine import kernel

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
CLOSED_FD = 1 << 20
PR_GET_DUMPABLE = 3


@linux
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number is that of x86-64")
def test_a_system_call_by_number_returns_its_result() -> None:
    assert kernel.syscall(39) == os.getpid()


@linux
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number is that of x86-64")
def test_a_system_call_that_fails_is_an_error_with_its_number() -> None:
    with pytest.raises(OSError, match="system call 3: ") as error_info:
        kernel.syscall(3, CLOSED_FD)
    assert error_info.value.errno == errno.EBADF


@linux
def test_prctl_takes_options_that_want_four_arguments_of_zero() -> None:
    assert kernel.prctl(PR_GET_DUMPABLE) in (0, 1, 2)
    with pytest.raises(OSError, match=r"prctl\(-1\)"):
        kernel.prctl(-1)


@linux
def test_a_mount_that_fails_names_its_target() -> None:
    with pytest.raises(OSError, match="mount tmpfs on /no/such/folder"):
        kernel.mount("tmpfs", "/no/such/folder", "tmpfs", 0)


def test_a_negative_result_is_an_error_and_any_other_comes_back() -> None:
    assert kernel.check_result(7, "call") == 7
    with pytest.raises(OSError, match="call: "):
        kernel.check_result(-1, "call")


def test_elsewhere_than_on_linux_every_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LINUX", False)
    for call in (
        lambda: kernel.syscall(39),
        lambda: kernel.prctl(PR_GET_DUMPABLE),
        lambda: kernel.unshare(0),
        lambda: kernel.capset(0, 0),
        lambda: kernel.mount("", "/", "", 0),
    ):
        with pytest.raises(OSError, match="Linux is needed") as error_info:
            call()
        assert error_info.value.errno == errno.ENOSYS
