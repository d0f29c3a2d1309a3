"""Both clocks mean the same, and the C++ one cannot be lied to."""

from __future__ import annotations

import time

import pytest
import torch

from torch_cudal1.core import native
from torch_cudal1.judge.benchmark import clock
from torch_cudal1.judge.benchmark.clock import Clock, Reading, choose_clock

CPU = torch.device("cpu")
needs_extension = pytest.mark.skipif(
    native.extension() is None, reason=f"no C++ timer: {native.status()[1]}"
)


@pytest.fixture(params=["native", "python"])
def on_cpu(request: pytest.FixtureRequest) -> Clock:
    if request.param == "python":
        return clock._PythonClock(CPU)
    if native.extension() is None:
        pytest.skip(f"no C++ timer: {native.status()[1]}")
    return choose_clock(CPU)


def nap() -> None:
    time.sleep(2e-3)


def test_readings_come_in_the_order_of_the_schedule(on_cpu: Clock) -> None:
    called: list[int] = []
    readings = on_cpu.read((lambda: called.append(0), lambda: (called.append(1), nap())), [1, 0, 1])
    assert called == [reading.call for reading in readings] == [1, 0, 1]
    assert all(reading.wall_us == reading.host_us for reading in readings)
    assert [reading.device_us for reading in readings] == [None] * 3
    assert min(readings[0].wall_us, readings[2].wall_us) >= 2_000


def test_a_sample_of_several_calls_is_the_time_of_them_all(on_cpu: Clock) -> None:
    called: list[int] = []
    single, many = on_cpu.read((nap, lambda: (called.append(1), nap())), [0, 1], repeats=(1, 5))
    assert len(called) == 5
    assert many.wall_us >= 10_000
    assert single.wall_us >= 2_000


def test_results_die_one_by_one(on_cpu: Clock) -> None:
    alive, most = [0], [0]

    class Result:
        def __init__(self) -> None:
            alive[0] += 1
            most[0] = max(most[0], alive[0])

        def __del__(self) -> None:
            alive[0] -= 1

    on_cpu.read((Result,), [0], repeats=(5,))
    assert (alive, most) == ([0], [1])


def test_what_a_call_raises_comes_through(on_cpu: Clock) -> None:
    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        on_cpu.read((broken,), [0])


@needs_extension
def test_python_s_clocks_do_not_reach_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"):
        monkeypatch.setattr(time, name, lambda: 0)
    assert choose_clock(CPU).read((lambda: sum(range(100_000)),), [0])[0].wall_us > 100
    assert clock._PythonClock(CPU).read((lambda: sum(range(100_000)),), [0])[0].wall_us == 0


def test_without_the_extension_it_is_python_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", lambda: None)
    monkeypatch.setattr(native, "status", lambda: (False, "it is left out here"))
    choose_clock.cache_clear()
    try:
        assert isinstance(choose_clock(CPU), clock._PythonClock)
    finally:
        choose_clock.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_both_clocks_agree_on_a_kernel() -> None:
    device = torch.device("cuda", 0)
    x = torch.randn(1 << 26, device=device)

    def fastest(readings: list[Reading]) -> Reading:
        return min(readings, key=lambda reading: reading.wall_us)

    for cold in (False, True):
        c, python = (
            fastest(each.read((lambda: x + 1,), [0] * 12, cold=cold))
            for each in (choose_clock(device), clock._PythonClock(device))
        )
        assert c.device_us == pytest.approx(python.device_us, rel=0.1)
        assert c.wall_us == pytest.approx(python.wall_us, rel=0.2)
