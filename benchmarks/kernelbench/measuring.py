"""All columns of a task against each other: interleaved rounds with the package's one timing
implementation, then ratios.

A round times every column once, in random order, L2 flushed before each call on a GPU; the numbers
of one round are pairs. Medians and 95 % intervals come from `judge.benchmark.statistics`. Host time
(until a call returns) and device time (between events) are measured separately. The candidate of a
release is not timed here: the ratio that the judge measured is applied to the times of this row.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernelbench.baselines import Call
from benchmarks.kernelbench.job import RELEASE, Job
from benchmarks.kernelbench.loading import Demand
from benchmarks.kernelbench.statistics import BEST
from benchmarks.kernelbench.task_channel import TaskChannel
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.gpu_lock import lock_gpu
from torch_cudal1.device.gpu_state import read_gpu_state
from torch_cudal1.device.peaks import find_device_peaks
from torch_cudal1.judge.benchmark.statistics import FEWEST_PAIRS, summarise
from torch_cudal1.judge.benchmark.timing import host_time_us, interleave, measure_device_time_us

__all__ = ["Measured", "compute_lower_bound_us", "compute_ratios", "is_drained", "measure_columns"]

# the columns have been called before; the clocks of the GPU rise while they take turns
_CLOCK_CALLS, _SETTLE_S = 3, 0.05
_MAX_LOCK_WAIT_S = 600.0
_MAX_DRAIN_S, _PROBE_WINDOW_S = 20.0, 0.05
# an empty GPU answers far sooner; processes on one take turns of milliseconds
_SLOW_PROBE_S, _MAX_SLOW_SHARE = 5e-4, 0.2
_MAX_WINDOW_ROUNDS = 100_000


@dataclass(frozen=True)
class Measured:
    """`samples`: microseconds a call, one a round; `times`: what a column's cell says; `state`: of
    the GPU, before and after, and whether another process used it.
    """

    samples: Mapping[str, Sequence[float]]
    times: Mapping[str, Mapping[str, float | None]]
    state: Mapping[str, Any]


def measure_columns(
    calls: Mapping[str, Call],
    input_sets: Sequence[tuple[Any, ...]],
    job: Job,
    line: TaskChannel,
    fail: Callable[[str, str], None],
) -> Measured:
    """Time every column while no other task of this run works. A column that raises is failed and
    left out of all rounds.
    """
    device = torch.device(job.device)
    runs = {name: _rotate_inputs(call, input_sets) for name, call in calls.items()}
    with lock_gpu(device, "measure", wait_s=_MAX_LOCK_WAIT_S) as shared, line.quiet():
        drained = device.type != "cuda" or is_drained(_make_probe(device))
        state: dict[str, Any] = {
            "shared": str(shared or ""),
            "drained": drained,
            "before": read_gpu_state(device),
        }
        for name in list(runs):
            try:
                runs[name]()
            except Exception as error:  # noqa: BLE001  as for any column: a row with the reason
                fail(name, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
                del runs[name]
        samples = _collect_samples(runs, device, job)
        clock_times = {name: _time_clocks(run, device) for name, run in runs.items()}
        state["after"] = read_gpu_state(device)
    times = {
        name: {"us": statistics.median(values), **clock_times[name]}
        for name, values in samples.items()
    }
    return Measured(samples, times, state)


def is_drained(probe: Callable[[], object], limit_s: float = _MAX_DRAIN_S) -> bool:
    """Wait until no other process's kernels run on the GPU: a stopped one leaves what it launched.
    False if that took too long.

    `probe`: a launch that does nothing, waited for; with kernels of another process there most of
    the time goes into few of them.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        begin, long_s = time.perf_counter(), 0.0
        while (now := time.perf_counter()) - begin < _PROBE_WINDOW_S:
            probe()
            spent_s = time.perf_counter() - now
            long_s += spent_s if spent_s > _SLOW_PROBE_S else 0.0
        if long_s < _MAX_SLOW_SHARE * _PROBE_WINDOW_S:
            return True
    return False


def _make_probe(device: torch.device) -> Callable[[], object]:
    scalar = torch.zeros(1, device=device)

    def probe() -> None:
        scalar.zero_()
        torch.cuda.synchronize(device)

    return probe


def compute_ratios(
    measured: Measured,
    job: Job,
    columns: dict[str, dict[str, Any]],
    paired: Mapping[str, Any] | None,
) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """The best baseline's name, and for each column its speed-up over every baseline and over the
    best one.
    """
    baselines = [
        name
        for name in job.baselines
        if name in measured.samples and columns[name]["status"] == "ok"
    ]
    if not baselines:
        return None, {}
    best = min(baselines, key=lambda name: float(columns[name]["us"]))
    ratios: dict[str, dict[str, Any]] = {}
    for name in (*baselines, *job.contenders):
        if name in measured.samples and columns[name]["status"] == "ok":
            ratios[name] = {
                base: _compute_ratio(measured.samples[base], measured.samples[name])
                for base in baselines
                if base != name
            }
            ratios[name][BEST] = ratios[name].get(best, _make_unit_ratio())
    if paired is not None and paired["over"] in baselines and columns[RELEASE]["status"] == "ok":
        over_us = float(columns[paired["over"]]["us"])
        columns[RELEASE]["us"] = over_us / paired["speedup"]
        ratios[RELEASE] = {
            base: _scale_ratio(paired, float(columns[base]["us"]) / over_us) for base in baselines
        }
        ratios[RELEASE][BEST] = ratios[RELEASE][best]
    return best, ratios


def compute_lower_bound_us(estimate: Demand, device: torch.device) -> float | None:
    """Microseconds below which the task as written cannot run on this GPU: its bytes, or its
    products at the peak of TF32.

    None on a CPU and on a GPU whose peaks are not known. IEEE float32 has a far lower peak: a task
    bound by products is above this.
    """
    limits = find_device_peaks(device)
    if device.type != "cuda" or isinstance(limits, Refusal):
        return None
    return 1e6 * max(
        estimate.least_bytes / limits.bytes_per_s, estimate.flops / limits.flops_per_s[4]
    )


def _rotate_inputs(call: Call, input_sets: Sequence[tuple[Any, ...]]) -> Callable[[], object]:
    turn = itertools.cycle(input_sets)
    return lambda: call(*next(turn))


def _collect_samples(
    runs: Mapping[str, Callable[[], object]], device: torch.device, job: Job
) -> dict[str, list[float]]:
    """Samples of at least seven rounds; with a window, of as many as fill it."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    window_end = time.monotonic() + (job.profile.measure_s if job.profile.window else 0.0)
    while runs:
        for name, values in interleave(
            runs, device, budget_s=job.profile.measure_s, settle_s=_SETTLE_S
        ).items():
            samples[name] += values
        rounds = min(map(len, samples.values()))
        if rounds >= _MAX_WINDOW_ROUNDS or (
            rounds >= FEWEST_PAIRS and time.monotonic() >= window_end
        ):
            break
    return samples


def _time_clocks(run: Callable[[], object], device: torch.device) -> dict[str, float | None]:
    host_us = host_time_us(run, device, calls=_CLOCK_CALLS)
    return {
        "host_us": host_us,
        "device_us": measure_device_time_us(run, device, calls=_CLOCK_CALLS)
        if device.type == "cuda"
        else None,
    }


def _compute_ratio(base: Sequence[float], contender: Sequence[float]) -> dict[str, float]:
    summary = summarise(list(zip(base, contender, strict=True)))
    return {
        "speedup": summary.speedup,
        "low": summary.low,
        "high": summary.high,
        "steady": int(summary.steady),
    }


def _scale_ratio(paired: Mapping[str, Any], factor: float) -> dict[str, float]:
    return {name: float(paired[name]) * factor for name in ("speedup", "low", "high")} | {
        "steady": 1
    }


def _make_unit_ratio() -> dict[str, float]:
    return {"speedup": 1.0, "low": 1.0, "high": 1.0, "steady": 1}
