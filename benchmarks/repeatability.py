"""Whether the clock can be trusted: a kernel against itself many times, and the same kernel timed
twice.

Two numbers are the result: how often one of two equal sides is called faster (its lower bound
reaches the margin of a swap), which must be under 1 % of all trials; and by how much two
measurements of one kernel above 50 us differ, which must be under 2 %. A chain of small launches is
timed too and reported apart: its microseconds are the host's, which may have other work. On a CPU
that others use, only the fact that it runs means anything. It times plain torch calls with the
judge's protocol and judges no kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.gpu_state import read_gpu_state
from torch_cudal1.judge.benchmark.protocol import LocalSampler, Measurement, Pairs, measure
from torch_cudal1.judge.benchmark.timing import L2, SampleBatch, WarmCosts, list_l2_states
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingPlan

__all__ = ["Kernel", "RepeatabilityRow", "list_kernels", "main", "run_trials", "summarise_rows"]

_ROOT = Path(__file__).resolve().parent.parent
_MAX_FALSE_SHARE, _MAX_DIFFERENCE, _LONG_US = 0.01, 0.02, 50.0
_HOST_BOUND = "eight small steps"  # no kernel, but what the host takes to launch eight
_MARGIN = Settings().margin
_INPUT_SETS = 4
_SAMPLE_DIVISOR = (
    8  # the trials' samples: noisier than the judge's, so the share of false calls is not flattered
)

Make = Callable[[torch.device], Callable[[], object]]


@dataclass(frozen=True)
class Kernel:
    """A name and how to make a call of it: each side of a trial gets inputs and addresses of its
    own.
    """

    name: str
    make: Make


@dataclass
class RepeatabilityRow:
    """One kernel and the results of its trials. Times are microseconds per call."""

    kernel: str
    trials: int = 0
    faster: int = 0  # lower bound at least the margin: a false swap
    above_one: int = 0  # lower bound above 1: right in 95 % intervals, and no swap
    unsteady: int = 0
    us: dict[str, list[float]] = field(default_factory=dict)
    speedups: list[float] = field(default_factory=list)
    # |difference| of two measurements of the whole plan, by state
    twice: dict[str, float] = field(default_factory=dict)

    def add(self, measurement: Measurement) -> None:
        """Count a trial."""
        self.trials += 1
        self.faster += measurement.summary.low >= _MARGIN
        self.above_one += measurement.summary.low > 1
        self.unsteady += not measurement.steady
        self.speedups.append(measurement.summary.speedup)
        for l2, state_summary in measurement.summaries.items():
            self.us.setdefault(l2, []).append((state_summary.a_us + state_summary.b_us) / 2)

    def to_json(self) -> dict[str, Any]:
        """For the results file: the spread of the trials instead of all of them."""
        logs = [abs(math.log(speedup)) for speedup in self.speedups]
        spread = {l2: max(values) / min(values) - 1 for l2, values in self.us.items()}
        middle = {l2: sorted(values)[len(values) // 2] for l2, values in self.us.items()}
        counts = {"faster": self.faster, "above_one": self.above_one, "unsteady": self.unsteady}
        most = {"most_log_speedup": max(logs, default=None), "most_apart": spread}
        return {
            "kernel": self.kernel,
            "trials": self.trials,
            **counts,
            "us": middle,
            **most,
            "twice": self.twice,
        }


@dataclass(frozen=True)
class _WarmSampler:
    """Two sides whose warm-up was measured once, for all their trials."""

    sides: LocalSampler
    warm_costs: tuple[WarmCosts, WarmCosts]

    @property
    def temperatures(self) -> tuple[L2, ...]:
        return self.sides.temperatures

    def warm_up(self) -> tuple[WarmCosts, WarmCosts]:
        return self.warm_costs

    def take_samples(self, batch: SampleBatch) -> Pairs:
        return self.sides.take_samples(batch)


def list_kernels(device: torch.device) -> list[Kernel]:
    """Kernels from a few microseconds to milliseconds on a large GPU: pointwise, reductions,
    products, a chain of small ones.
    """
    scale = 1 if device.type == "cuda" else 8
    sizes = [512, 1024, 2048, 4096, 8192]
    kernel_list = [
        Kernel(f"gelu {n}x{n}", _make_unary(torch.nn.functional.gelu, n // scale)) for n in sizes
    ]
    kernel_list += [
        Kernel(f"softmax {n}x{n}", _make_unary(lambda x: x.softmax(-1), n // scale))
        for n in sizes[1:4]
    ]
    kernel_list += [
        Kernel(f"matmul {n}", _make_unary(lambda x: x @ x, n // scale)) for n in sizes[:4]
    ]
    return [*kernel_list, Kernel(_HOST_BOUND, _make_unary(_run_small_steps, 256))]


def run_trials(
    device: torch.device, trials: int, plan: TimingPlan, kernels_to_run: Sequence[Kernel]
) -> list[RepeatabilityRow]:
    """`trials` measurements spread over the kernels in turn, then each kernel above 50 us twice
    under the whole plan.
    """
    rows = [RepeatabilityRow(kernel.name) for kernel in kernels_to_run]
    pairs = [
        LocalSampler(kernel.make(device), kernel.make(device), device, list_l2_states(device, plan))
        for kernel in kernels_to_run
    ]
    sides = [_WarmSampler(local, local.warm_up()) for local in pairs]
    # as the judge decides
    short = replace(plan, side_us=plan.side_us / _SAMPLE_DIVISOR, margin=_MARGIN)
    for row, side in itertools.islice(itertools.cycle(zip(rows, sides, strict=True)), trials):
        row.add(measure(side, short))
    for row, side in zip(rows, sides, strict=True):
        if row.us and min(values[0] for values in row.us.values()) > _LONG_US:
            first, second = measure(side, plan).summaries, measure(side, plan).summaries
            row.twice = {str(l2): abs(first[l2].b_us / second[l2].b_us - 1) for l2 in first}
    return rows


def summarise_rows(rows: Sequence[RepeatabilityRow], *, judged: bool) -> dict[str, Any]:
    """Both numbers and whether they are reached; `passed` is None where the machine does not count."""
    trials, faster = sum(row.trials for row in rows), sum(row.faster for row in rows)
    differences = [
        value for row in rows for value in row.twice.values() if row.kernel != _HOST_BOUND
    ]
    of_host = max(
        (value for row in rows for value in row.twice.values() if row.kernel == _HOST_BOUND),
        default=None,
    )
    share, worst = faster / max(1, trials), max(differences, default=None)
    passed = share < _MAX_FALSE_SHARE and (worst is None or worst < _MAX_DIFFERENCE) and trials > 0
    counts = {
        "trials": trials,
        "called_faster": faster,
        "called_faster_share": share,
        "margin": _MARGIN,
    }
    return {
        **counts,
        "timed_twice": len(differences),
        "worst_apart": worst,
        "host_apart": of_host,
        "passed": passed if judged else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 where a GPU misses a number."""
    args = _parser().parse_args(argv)
    device = torch.device(args.device)
    environment, before, begin = report.environment(), read_gpu_state(device), time.monotonic()
    with torch.no_grad():
        rows = run_trials(device, args.trials, TIMING_PLANS["fast"], list_kernels(device))
    result = summarise_rows(rows, judged=device.type == "cuda")
    states = {
        "before": before,
        "after": read_gpu_state(device),
        "seconds": round(time.monotonic() - begin, 1),
    }
    value = report.make_document(
        "repeatability",
        {"device": args.device, "trials": args.trials},
        [row.to_json() for row in rows if row.trials],
        command=f"python -m benchmarks.repeatability --device {args.device} --trials {args.trials}",
        environment=environment,
        state=states,
        summary=result,
    )
    report.save(args.out, value)
    for row in value["rows"]:
        us = ", ".join(f"{l2} {cost:.1f} us" for l2, cost in row["us"].items())
        twice = (
            ", ".join(f"{l2} {100 * difference:.2f} %" for l2, difference in row["twice"].items())
            or "-"
        )
        print(
            f"{row['kernel']:20} {row['trials']:3} trials, {row['faster']} called faster, {us}; timed twice: {twice}"
        )
    print(json.dumps(result))
    return 1 if result["passed"] is False else 0


def _make_unary(function: Callable[[torch.Tensor], object], size: int) -> Make:
    def make(device: torch.device) -> Callable[[], object]:
        turn = itertools.cycle([torch.randn(size, size, device=device) for _ in range(_INPUT_SETS)])
        return lambda: function(next(turn))

    return make


def _run_small_steps(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(x) + x
    return x


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.repeatability", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--trials",
        type=int,
        default=200,
        help="of a kernel against itself, spread over all kernels",
    )
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "benchmarks" / "results" / "repeatability.json"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
