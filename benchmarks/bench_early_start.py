"""What it brings that a kernel begins before the one ahead of it has ended (programmatic dependent
launch): chains of a transformer's layers as CUDA graphs, with it and without.

    python -m benchmarks.bench_early_start [--only NAME] [--budget-s 10] [--out early-start.json]

Both graphs hold the same machine code; they differ in the attribute of its launches alone
(`torch_cudal1/device/cuda/early_start.py`). Of each case the first proposals of all fusion groups
are built here; what they leave is PyTorch's. Times are of replays in turns on a cold L2 cache. A
result that is not bit for bit that of the ordinary launches, in any of many replays with other
inputs, makes the case wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.bench_families import CapturedCase, capture_case
from benchmarks.family_cases import FamilyCase
from benchmarks.report import environment, make_document, save
from torch_cudal1.device.cuda import driver
from torch_cudal1.device.cuda.early_start import MIN_SM
from torch_cudal1.graph.fusion.partition import splice
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Call, Launch, Program
from torch_cudal1.judge.benchmark.protocol import sample_pairs
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.kernels import build, propose
from torch_cudal1.runtime.cuda_graph import GraphedRunner
from torch_cudal1.runtime.executor import prepare

__all__ = ["CASES", "build_chain", "count_launches", "main", "measure_case"]

_COMPARED_REPLAYS = 200
_LAYERS = 6


class _Block(nn.Module):
    """What a transformer's layer has beside attention: two norms, and products with a bias, GELU
    and residuals.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first_norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


def _make_case(name: str, make_layer: Callable[[], nn.Module], *shape: int) -> FamilyCase:
    def make_module() -> nn.Module:
        return nn.Sequential(*(make_layer() for _ in range(_LAYERS))).bfloat16()

    return FamilyCase(
        "chain",
        name,
        make_module,
        lambda: (torch.randn(shape, dtype=torch.bfloat16),),
        products=True,
    )


CASES = (
    _make_case("blocks 768, 128 rows", lambda: _Block(768), 128, 768),
    _make_case("blocks 1024, 512 rows", lambda: _Block(1024), 512, 1024),
    _make_case("linear 768, 128 rows", lambda: nn.Linear(768, 768), 128, 768),
    _make_case("linear 4096, 16 rows", lambda: nn.Linear(4096, 4096), 16, 4096),
    _make_case("norms 768, 128 rows", lambda: nn.LayerNorm(768), 128, 768),
)


def build_chain(captured: CapturedCase, sm: int) -> Program:
    """The case's Program with the first proposal of each of its fusion groups, for `sm_{sm}`."""
    kernels = {}
    for group in captured.parts.groups:
        program = group.region.program
        kernels[group] = build(program, propose(program, sm, most=1)[0], sm)
    return splice(captured.program, kernels)


def count_launches(program: Program) -> int:
    """Launches of the Program and of those in it."""
    return sum(
        count_launches(step.program) if isinstance(step, Call) else isinstance(step, Launch)
        for step in program.steps
    )


def measure_case(case: FamilyCase, device: torch.device, budget_s: float) -> dict[str, Any]:
    """Microseconds of both graphs, and the speed-up with its interval."""
    captured = capture_case(case, device)
    major, minor = torch.cuda.get_device_capability(device)
    program = build_chain(captured, 10 * major + minor)
    early = _make_graph(prepare(program, device), captured, device)
    with mock.patch.object(driver, "waits_first", return_value=False):
        late = _make_graph(prepare(program, device), captured, device)
    row: dict[str, Any] = {"case": case.name, "launches": count_launches(program)}
    # Both run once, so that their graphs are captured, and then in many ways of meeting.
    different = _count_different_replays(early, late, captured.tensors)
    inputs = captured.tensors
    summary = summarise(
        sample_pairs(lambda: late(inputs), lambda: early(inputs), device, budget_s=budget_s)
    )
    return row | {
        "status": "wrong" if different else "ok",
        "different": different,
        "ordinary_us": summary.a_us,
        "early_us": summary.b_us,
        "speedup": summary.speedup,
        "low": summary.low,
        "high": summary.high,
    }


def _make_graph(runner: Runner, captured: CapturedCase, device: torch.device) -> Runner:
    # Nothing is copied in: the graph holds the kernels alone.
    return GraphedRunner(runner, frozenset(range(len(captured.tensors))), device)


def _count_different_replays(early: Runner, late: Runner, tensors: list[Tensor]) -> int:
    """Of many replays with changing inputs, those whose results are not the same bits."""
    different = 0
    changing = [tensor for tensor in tensors if tensor.dim() > 1][-1]
    for _ in range(_COMPARED_REPLAYS):
        changing.normal_()
        pairs = zip(early(tensors), late(tensors), strict=True)
        different += not all(
            torch.equal(one, other) for one, other in pairs if one is not None and other is not None
        )
    return different


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases; 0 if all results were right, 2 without a GPU that has such launches."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_early_start", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--budget-s", type=float, default=10.0, help="of timing, for each case")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < divmod(MIN_SM, 10):
        print(f"a GPU of sm_{MIN_SM} or newer is needed: older ones start no kernel early")
        return 2
    rows = []
    for case in CASES:
        if args.only in case.name:
            with torch.inference_mode():
                rows.append(row := measure_case(case, torch.device("cuda", 0), args.budget_s))
            print(
                f"{row['case']:24} {row['launches']:3} launches  ordinary {row['ordinary_us']:7.1f} us  early "
                f"{row['early_us']:7.1f} us  {row['speedup']:.3f}x [{row['low']:.3f}, {row['high']:.3f}]  {row['status']}",
                flush=True,
            )
    if args.out is not None:
        options = {"only": args.only, "budget_s": args.budget_s}
        save(args.out, make_document("early-start", options, rows, environment=environment()))
    return 0 if all(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
