"""Inductor block by block beside Inductor as a whole: what it takes to compile, how many kernels it
makes, and how fast both run: `python -m benchmarks.real_models.blocks --out blocks.json`.

Both compile without a cache of Inductor. On a GPU both run in a CUDA graph, in turns. A model in
which no block repeats has a row that says so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.real_models.zoo import MODELS, build_model
from torch_cudal1.api.end_to_end import end_to_end_benchmark
from torch_cudal1.graph.captured import capture_call_graphs, get_examples, lower_captured
from torch_cudal1.ir.blocks import BlockPartition, partition_blocks
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.schedule import INDUCTOR, REGIONAL, Schedule
from torch_cudal1.runtime.runner import build_runner

__all__ = ["main", "measure_model"]

# Of one comparison.
_BENCHMARK_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and write its results. Exit code 1 if a model failed."""
    args = _parser().parse_args(argv)
    device = torch.device(args.device)
    rows = []
    for name in args.models:
        started_s = time.perf_counter()
        try:
            row = measure_model(name, args.size, args.precision, device)
        # Whatever a model raises is its row: the others go on.
        except Exception as error:  # noqa: BLE001
            row = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        rows.append({"model": name, **row, "seconds": time.perf_counter() - started_s})
        print(rows[-1], flush=True)
        options = {"models": args.models, "size": args.size, "precision": args.precision}
        document = report.make_document(
            "real_models.blocks", options, rows, environment=report.environment()
        )
        command = document["command"].replace(
            "benchmarks.bench_real_models", "benchmarks.real_models"
        )
        report.save(args.out, {**document, "command": command})
    return 1 if any("failed" in row for row in rows) else 0


def measure_model(name: str, size: str, precision: str, device: torch.device) -> dict[str, Any]:
    """One model's row: its blocks and, where it has any, seconds, kernels and microseconds of both
    ways. Raises what the capture and Inductor raise.
    """
    module, args, kwargs = build_model(name, size, precision, device)  # type: ignore[arg-type]
    with torch.no_grad():
        captured, traced = capture_call_graphs(module, args, kwargs)
        (graph,) = traced.graphs
        lowered = lower_captured(graph, module)
        inputs = get_examples(lowered, graph, captured)
        assert inputs is not None
        region = lowered.region
        started_s = time.perf_counter()
        partition = partition_blocks(region.program)
        row = {"find_blocks_s": time.perf_counter() - started_s, **_describe_blocks(partition)}
        if not partition.blocks:
            return row
        static = [index for index, role in enumerate(region.roles) if role != "input"]
        runners: dict[Schedule, Runner] = {}
        for schedule in (INDUCTOR, REGIONAL):
            build = partial(build_runner, region.program, schedule, device, static=static)
            runners[schedule], facts = _measure_compilation(build, inputs)
            row[str(schedule)] = facts
        if device.type == "cuda":
            runners = {
                schedule: build_runner(
                    region.program,
                    Schedule(schedule.base, cuda_graph=True),
                    device,
                    static=static,
                    compiled=runner,
                )
                for schedule, runner in runners.items()
            }
        whole, by_blocks = (partial(runners[schedule], inputs) for schedule in (INDUCTOR, REGIONAL))
        difference = max(
            float((a.float() - b.float()).abs().max())
            for a, b in zip(whole(), by_blocks(), strict=True)
            if a is not None and b is not None
        )
        summary = end_to_end_benchmark(
            whole, by_blocks, device, budget_s=_BENCHMARK_S, max_attempts=1
        )
    return {
        **row,
        "largest_difference": difference,
        "whole_us": summary.a_us,
        "by_blocks_us": summary.b_us,
        "speedup": {"value": summary.speedup, "low": summary.low, "high": summary.high},
    }


def _describe_blocks(partition: BlockPartition) -> dict[str, Any]:
    return {
        "steps": len(partition.program.steps),
        "distinct_share": partition.distinct_share,
        "lost_fusions": partition.lost_fusions,
        "blocks": [
            {"occurrences": len(block.occurrences), "steps": len(block.program.steps)}
            for block in partition.blocks
        ],
    }


def _measure_compilation(
    build: Callable[[], Runner], inputs: Sequence[torch.Tensor]
) -> tuple[Runner, dict[str, float]]:
    """What was built, and the seconds up to its first answer and the kernels that were made; of
    blocks those of one occurrence.
    """
    from torch._inductor import config, metrics

    metrics.reset()
    started_s = time.perf_counter()
    with config.patch(force_disable_caches=True):
        runner = build()
    runner(inputs)
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started_s
    return runner, {"compile_s": seconds, "compiled_kernels": metrics.generated_kernel_count}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_models.blocks",
        description="Inductor block by block beside Inductor as a whole.",
    )
    parser.add_argument("--out", type=Path, required=True, help="results file (JSON)")
    parser.add_argument(
        "--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS), metavar="MODEL"
    )
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--precision", choices=("half", "fp32", "bf16", "fp16"), default="half")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
