"""A GPU is used step by step, and the step that fails is named with its status."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_cudal1.judge.sandbox.confine.gpu import use_gpu


class FakeDriver:
    """A CUDA driver whose calls succeed but for `failing`; its kernel stores `stored`."""

    def __init__(self, failing: str = "", stored: int = 42) -> None:
        self.failing, self.stored = failing, stored
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuMemcpyDtoH_v2":
                ctypes.cast(args[0], ctypes.POINTER(ctypes.c_uint32))[0] = self.stored
            return 304 if name == self.failing else 0

        return call


def install_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)


def test_every_step_is_taken_and_what_was_taken_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    install_driver(monkeypatch, driver)
    assert use_gpu() == "made a context, allocated, compiled, launched"
    assert driver.calls[0] == "cuInit"
    assert driver.calls.index("cuModuleLoadData") < driver.calls.index("cuLaunchKernel")
    assert driver.calls[-2:] == ["cuMemFree_v2", "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize("name", ["cuInit", "cuDevicePrimaryCtxRetain", "cuLaunchKernel"])
def test_a_step_that_fails_is_named_and_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    driver = FakeDriver(failing=name)
    install_driver(monkeypatch, driver)
    with pytest.raises(OSError, match=f"{name} answered 304") as error_info:
        use_gpu()
    assert error_info.value.errno == errno.EIO
    assert driver.calls[-1] == name


def test_a_kernel_that_stores_another_value_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(monkeypatch, FakeDriver(stored=0))
    with pytest.raises(OSError, match="stored 0 instead of 42"):
        use_gpu()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_the_gpu_of_this_machine_can_be_used() -> None:
    assert use_gpu() == "made a context, allocated, compiled, launched"
