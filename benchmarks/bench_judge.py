"""What an evaluation by the judge costs: seconds per candidate after its processes have started.

    python -m benchmarks.bench_judge [--device cpu] [--profile fast] [--repeats 5] [--forms Program source] [--out judge.json]

A Program candidate is a layer's own region, evaluated in a worker process that stays alive, as in a
search. A source candidate is the reference itself under another name, in a process of its own; the
start of that process, the reading of the reference and the timing of the baselines are shared by
all candidates of the reference and reported apart. The first candidate also pays for the results of
eager and of float64, which later ones find cached. A refused candidate is a failed row: a cheap
refusal must not pass for speed. A candidate need not be accepted, for it is as fast as its
baseline.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.report import environment, make_document, save
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import Candidate, Contract
from torch_cudal1.ir.schedule import EAGER
from torch_cudal1.judge import (
    Evaluation,
    EvaluationConfig,
    evaluate_candidate,
    pool_scope,
    rank_baselines,
)
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingProfile
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator

__all__ = [
    "GOAL_S",
    "LAYERS",
    "SOURCES",
    "Layer",
    "Row",
    "Source",
    "main",
    "measure_programs",
    "measure_sources",
]

GOAL_S = {"cpu": 10.0, "cuda": 3.0}  # of a typical candidate at profile fast
_SHARED = ("start", "reference", "baselines")
_SHOWN_STEPS = 8  # steps
Row = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """An ordinary layer and the shape of its input."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A layer as text: the bodies of `__init__` and `forward`."""

    name: str
    layer: str
    forward: str
    shape: tuple[int, ...]

    def text(self, entry: str) -> str:
        """A KernelBench-style file whose module is called `entry`."""
        return (
            f"import torch\n\n\nclass {entry}(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"        {self.layer}\n\n    def forward(self, x):\n        return {self.forward}\n\n\n"
            f"def get_inputs():\n    return [torch.randn({self.shape})]\n\n\ndef get_init_inputs():\n    return []\n"
        )


LAYERS = (
    Layer("linear, gelu", lambda: nn.Sequential(nn.Linear(768, 3072), nn.GELU()), (64, 768)),
    Layer("layer norm", lambda: nn.LayerNorm(768), (256, 768)),
    Layer("softmax", lambda: nn.Softmax(-1), (256, 1024)),
    Layer(
        "conv, batch norm, relu",
        lambda: nn.Sequential(nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
        (4, 32, 28, 28),
    ),
    Layer(
        "encoder layer",
        lambda: nn.TransformerEncoderLayer(256, 4, 512, batch_first=True),
        (2, 64, 256),
    ),
)
SOURCES = (
    Source("softmax", "self.dim = -1", "torch.softmax(x, self.dim)", (256, 1024)),
    Source(
        "linear, relu",
        "self.linear = torch.nn.Linear(256, 256)",
        "torch.relu(self.linear(x))",
        (64, 256),
    ),
)


def measure_programs(
    layers: Sequence[Layer], device: torch.device, profile: TimingProfile, repeats: int
) -> Iterator[Row]:
    """One row a layer: seconds of the first candidate, its longest steps, and the median of the
    next ones.
    """
    for layer in layers:
        head = {"candidate": layer.name, "form": "Program"}
        try:
            yield head | _evaluate_program(layer, device, profile, repeats)
        except (Cudal1Error, RuntimeError) as error:
            yield head | {"status": "failed", "reason": str(error)[:300]}


def _evaluate_program(
    layer: Layer, device: torch.device, profile: TimingProfile, repeats: int
) -> Row:
    torch.manual_seed(0)
    module, x = layer.build().eval().to(device), torch.randn(layer.shape, device=device)
    with torch.no_grad():
        (region,) = capture_regions(module, (x,))
    config = EvaluationConfig(Settings(), Contract(), device, plan=TIMING_PLANS[profile])
    candidate = Candidate(region.program, EAGER, "benchmark", ("itself",))
    durations_s: list[float] = []
    steps: dict[str, float] = {}
    with pool_scope():
        begin = time.perf_counter()
        ranking = rank_baselines(region, (EAGER,), config)
        shared = time.perf_counter() - begin
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            evaluation = evaluate_candidate(region, candidate, ranking, config)
            durations_s.append(time.perf_counter() - begin)
            if not evaluation.verdict.passed:
                return {"status": "failed", "reason": f"refused: {evaluation.verdict.failure}"}
            steps = steps or _split_steps(evaluation, durations_s[0])
    return _make_row(durations_s, shared, steps)


def _split_steps(evaluation: Evaluation, seconds: float) -> dict[str, float]:
    """Seconds of each step of the evaluation that just ended. `rest`: sending the Program to the
    worker, and other steps that are not timed.
    """
    validated = [
        event
        for event in telemetry.report().events
        if (event.stage, event.what) == ("judge", "validated")
    ]
    steps: dict[str, float] = dict(validated[-1].facts["seconds"]) if validated else {}
    if evaluation.timing is not None:
        steps["timing"] = float(evaluation.timing.details["seconds"])
    return {**steps, "rest": seconds - sum(steps.values())}


def measure_sources(
    sources: Sequence[Source], device: torch.device, profile: TimingProfile, repeats: int
) -> Iterator[Row]:
    """The same for sources; `shared_s` is what all candidates of a reference share."""
    for source in sources:
        head = {"candidate": source.name, "form": "source"}
        try:
            yield head | _evaluate_source(source, device, profile, repeats)
        except Cudal1Error as error:
            yield head | {"status": "failed", "reason": str(error)[:300]}


def _evaluate_source(
    source: Source, device: torch.device, profile: TimingProfile, repeats: int
) -> Row:
    durations_s: list[float] = []
    steps: dict[str, float] = {}
    shared = 0.0
    with SourceEvaluator(
        SourceEvaluationConfig(Settings(), Contract(), device, profile)
    ) as evaluator:
        for _ in range(repeats + 1):
            evaluation = evaluator.evaluate(source.text("Model"), source.text("ModelNew"))
            if not evaluation.verdict.passed:
                return {"status": "failed", "reason": f"refused: {evaluation.verdict.failure}"}
            own_steps_s = {
                step: seconds
                for step, seconds in evaluation.elapsed_s.items()
                if step not in _SHARED
            }
            durations_s.append(sum(own_steps_s.values()))
            steps = steps or own_steps_s
            shared = max(shared, sum(evaluation.elapsed_s.get(step, 0.0) for step in _SHARED))
    return _make_row(durations_s, shared, steps)


def _make_row(durations_s: Sequence[float], shared: float, steps: Mapping[str, float]) -> Row:
    longest = {
        step: round(steps[step], 3)
        for step in sorted(steps, key=steps.__getitem__, reverse=True)[:_SHOWN_STEPS]
    }
    return {
        "status": "ok",
        "first_s": durations_s[0],
        "next_s": statistics.median(durations_s[1:]),
        "shared_s": shared,
        "first_steps_s": longest,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 where a candidate was not judged, or a first one took longer than the goal
    at profile fast.
    """
    args = _parser().parse_args(argv)
    device, facts = torch.device(args.device), environment()
    options = {
        "device": args.device,
        "profile": args.profile,
        "repeats": args.repeats,
        "forms": args.forms,
    }
    rows: list[Row] = []
    summary: Row = {}
    row_sources = {
        "Program": lambda: measure_programs(LAYERS, device, args.profile, args.repeats),
        "source": lambda: measure_sources(SOURCES, device, args.profile, args.repeats),
    }
    for form in args.forms:
        for row in row_sources[form]():
            rows.append(row)
            print(_format_row(row), file=sys.stderr, flush=True)
            summary = _summarise(rows, GOAL_S[device.type] if args.profile == "fast" else None)
            if args.out:  # at once: a run that is cut short has measured something
                save(
                    args.out,
                    make_document("judge", options, rows, environment=facts, summary=summary),
                )
    missed = (
        summary["goal_s"] is not None
        and summary["worst_first_s"] is not None
        and summary["worst_first_s"] > summary["goal_s"]
    )
    return 1 if summary["failed"] or missed else 0


def _summarise(rows: Sequence[Row], goal_s: float | None) -> Row:
    worst = max((row["first_s"] for row in rows if row["status"] == "ok"), default=None)
    return {
        "worst_first_s": worst,
        "failed": sum(row["status"] != "ok" for row in rows),
        "goal_s": goal_s,
    }


def _format_row(row: Row) -> str:
    if row["status"] != "ok":
        return f"{row['candidate']} ({row['form']}): {row['reason']}"
    seconds = (
        f"first {row['first_s']:.2f} s, next {row['next_s']:.2f} s, shared {row['shared_s']:.2f} s"
    )
    return f"{row['candidate']} ({row['form']}): {seconds}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_judge", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--profile", choices=tuple(TIMING_PLANS), default="fast")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--forms", nargs="+", choices=("Program", "source"), default=["Program", "source"]
    )
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
