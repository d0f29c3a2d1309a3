# ruff: noqa: F811  fixtures of another file are arguments here
"""The C++ timer calls in the order of its schedule and tells the time of each call, whatever
Python's clocks were made to say.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from typing import Any

import pytest
import torch

from tests.device.test_cubin import build  # noqa: F401  (fixtures, here and below)
from tests.device.test_driver import GPU, cuda, number, recorder_path  # noqa: F401
from torch_cudal1.core import native
from torch_cudal1.core.errors import DriverError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.timer import make_timer

pytestmark = pytest.mark.skipif(
    native.extension() is None, reason=f"no C++ timer: {native.status()[1]}"
)
CPU = torch.device("cpu")


def test_calls_come_in_the_order_of_the_schedule_with_their_times():
    called: list[int] = []
    calls = tuple(lambda i=i: (called.append(i), time.sleep(0.002 * i)) for i in range(3))
    samples = make_timer(CPU).run(calls, [2, 0, 1, 0, 2])
    assert called == [index for index, *_ in samples] == [2, 0, 1, 0, 2]
    for index, wall, host, device in samples:
        assert wall == host >= 2_000 * index
        assert device is None


def test_python_s_clocks_do_not_matter(monkeypatch):
    watch = make_timer(CPU)
    for name in ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns"):
        monkeypatch.setattr(time, name, lambda: 0)
    ((_, wall, _, _),) = watch.run((lambda: sum(range(100_000)),), [0])
    assert wall > 100


def test_results_die_after_the_clock_has_stopped():
    died = [0]

    class Slow:
        def __del__(self) -> None:
            died[0] = time.monotonic_ns()  # the timer's own clock
            time.sleep(0.05)

    before = time.monotonic_ns()
    ((_, wall, _, _),) = make_timer(CPU).run((Slow,), [0])
    assert wall * 1e3 <= died[0] - before  # had it died inside, the sleep would be in its time


def test_a_sample_of_several_calls_is_the_time_of_them_all_and_holds_one_result():
    alive, max_alive, other_calls = [0], [0], []

    class Result:
        def __init__(self) -> None:
            alive[0] += 1
            max_alive[0] = max(max_alive[0], alive[0])
            time.sleep(0.002)

        def __del__(self) -> None:
            alive[0] -= 1

    ((_, many, _, _), _) = make_timer(CPU).run(
        (Result, lambda: other_calls.append(1)), [0, 1], None, (5, 1)
    )
    assert many >= 10_000
    assert (alive, max_alive, other_calls) == ([0], [1], [1])


def test_ten_thousand_samples_leak_nothing_whether_calls_return_or_raise():
    watch = make_timer(CPU)

    def calls(count: int) -> None:
        watch.run((lambda: torch.empty(100),), [0] * count, None, (2,))
        for _ in range(count):
            with pytest.raises(ZeroDivisionError):
                watch.run((lambda: 1 // 0,), [0])

    calls(300)
    gc.collect()
    objects, peak = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(10_000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8_000  # kB


def test_what_a_call_raises_is_the_caller_s():
    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make_timer(CPU).run((broken,), [0])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (((), [0]), ValueError),
        (((print,), [1]), ValueError),
        (((print,), [-1]), ValueError),
        (((print,), ["x"]), TypeError),
        (((3,), [0]), TypeError),
        (([print], [0]), TypeError),
        (((print,), [0], (1,)), TypeError),
        (((print,), [0], None, ()), ValueError),
        (((print,), [0], None, (0,)), ValueError),
        (((print,), [0], None, ("x",)), TypeError),
        (((print,), [0], None, [1]), TypeError),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(arguments: Any, error: type[Exception]):
    with pytest.raises(error):
        make_timer(CPU).run(*arguments)


def test_on_a_device_every_call_is_flushed_joined_and_between_events(cuda):
    watch = make_timer(GPU)
    memory = torch.ones(1000, dtype=torch.uint8)
    samples = watch.run(
        (lambda: None, lambda: time.sleep(0.002)), [0, 1, 1], (memory.data_ptr(), 1000)
    )
    assert not memory.any()
    assert [index for index, *_ in samples] == [0, 1, 1]
    assert all(device == pytest.approx(1500.0) for *_, device in samples)
    assert all(wall >= host >= 2000 for index, wall, host, _ in samples if index == 1)
    assert (number(cuda, "fills"), number(cuda, "joins"), number(cuda, "recorded")) == (3, 6, 6)
    assert number(cuda, "calls_push") == number(cuda, "calls_pop")
    del watch
    gc.collect()
    assert number(cuda, "events_alive") == 0


def test_a_call_that_fails_leaves_the_context_as_it_was(cuda):
    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        make_timer(GPU).run((broken,), [0])
    assert number(cuda, "calls_push") == number(cuda, "calls_pop")


def test_a_driver_that_refuses_is_an_error_with_its_name(cuda):
    watch = make_timer(GPU)
    ctypes.c_int.in_dll(cuda.library, "fail_stream").value = 7
    with pytest.raises(DriverError, match="the current stream"):
        watch.run((print,), [0])
    assert number(cuda, "calls_push") == number(cuda, "calls_pop")


def test_without_the_extension_it_says_why(monkeypatch):
    monkeypatch.setattr(native, "extension", lambda: None)
    monkeypatch.setattr(native, "status", lambda: (False, "not built: no compiler"))
    assert make_timer(CPU) == Refusal("not built: no compiler")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_device_clock_sees_the_kernel_and_the_host_clock_every_stream():
    x, side = torch.randn(1 << 24, device="cuda"), torch.cuda.Stream()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def elsewhere() -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(4_000_000)

    watch = make_timer(x.device)
    watch.run((lambda: x + 1, elsewhere), [0, 1])
    samples = watch.run((lambda: x + 1, elsewhere), [0, 1] * 5, (flush.data_ptr(), flush.numel()))
    for index, wall, host, device in samples:
        assert device is not None
        assert host < wall
        if index == 0:
            assert 15 < device < wall  # 128 MB at less than 8 TB/s
    # The device clock stands on the current stream only; of five calls the host does not stall in
    # each, which would look the same.
    assert (
        max(
            wall - device for index, wall, _, device in samples if index == 1 and device is not None
        )
        > 1_000
    )
