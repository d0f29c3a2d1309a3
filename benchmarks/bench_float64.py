"""Seconds of the judge's float64 references for transposed convolutions: by the judge's own steps,
and by PyTorch's float64 kernels.

    python -m benchmarks.bench_float64 [--device cpu] [--scale 8] [--out float64.json]

Both are timed in turns of random order, medians of `--rounds` (3) after a first call of each; both
answers are compared. A shape that does not run is a row with its reason. `--scale` divides
channels, for machines without a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import report
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.reference.float64 import compute_exact_outputs

__all__ = ["CASES", "TransposedConvCase", "main", "measure_case"]


@dataclass(frozen=True)
class TransposedConvCase:
    """A transposed convolution: input (batch, inner, *size), weight (inner, outer, *kernel), one
    stride and one padding for all axes.
    """

    batch: int
    inner: int
    outer: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int
    padding: int = 0


# sizes of vision and volume networks: up-sampling by two, and wide kernels
CASES = (
    TransposedConvCase(16, 64, 64, (4_096,), (5,), 1),
    TransposedConvCase(8, 128, 64, (128, 128), (3, 3), 1, 1),
    TransposedConvCase(16, 64, 32, (128, 128), (4, 4), 2, 1),
    TransposedConvCase(4, 32, 32, (32, 64, 64), (3, 3, 3), 2, 1),
    TransposedConvCase(8, 32, 32, (64, 64, 64), (3, 5, 5), 1),
)


@dataclass(frozen=True)
class Float64Row:
    """Seconds of both implementations and the difference of their answers, or the reason why there
    are none.
    """

    case: TransposedConvCase
    judge_s: float | None = None
    library_s: float | None = None
    difference: float | None = None
    reason: str = ""


def measure_case(case: TransposedConvCase, device: torch.device, rounds: int) -> Float64Row:
    """Time both implementations on one shape. Inputs are float32, as in the judge."""
    x = torch.randn(case.batch, case.inner, *case.size, device=device)
    weight = torch.randn(case.inner, case.outer, *case.kernel, device=device)
    dims = len(case.size)
    geometry = ([case.stride] * dims, [case.padding] * dims, [1] * dims, True, [0] * dims, 1)
    step = Aten(
        "aten.convolution.default",
        (Value(0), Value(1), None, *(tuple(a) if isinstance(a, list) else a for a in geometry)),
        (),
        (2,),
    )
    program = Program((TensorSpec.of(x), TensorSpec.of(weight)), (step,), (2,))

    def judge() -> torch.Tensor:
        exact = compute_exact_outputs(program, [x, weight], device)
        assert not isinstance(exact, Refusal), exact.reason
        assert exact[0] is not None
        return exact[0]

    def library() -> torch.Tensor:
        return torch.convolution(x.double(), weight.double(), None, *geometry)

    ways: dict[str, Callable[[], torch.Tensor]] = {"judge": judge, "library": library}
    try:
        difference = float((judge() - library()).abs().max())
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name in random.sample(list(ways), len(ways)):
                seconds[name].append(_time_call(ways[name], device))
    except Exception as error:  # noqa: BLE001  the reason is the row
        return Float64Row(case, reason=f"{type(error).__name__}: {error}".splitlines()[0])
    return Float64Row(
        case, statistics.median(seconds["judge"]), statistics.median(seconds["library"]), difference
    )


def _time_call(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    synchronise(device)
    begin = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - begin


def _scale_down(case: TransposedConvCase, scale: int) -> TransposedConvCase:
    return TransposedConvCase(
        1,
        *(max(1, n // scale) for n in (case.inner, case.outer)),
        case.size,
        case.kernel,
        case.stride,
        case.padding,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every shape; 0 if all ran."""
    parser = argparse.ArgumentParser(prog="bench_float64", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("float64.json"))
    args = parser.parse_args(argv)
    environment, rows = report.environment(), []
    for case in CASES:
        row = measure_case(
            case if args.scale == 1 else _scale_down(case, args.scale),
            torch.device(args.device),
            args.rounds,
        )
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
        row_values = [asdict(row) for row in rows]
        report.save(
            args.out,
            report.make_document(
                "float64", vars(args) | {"out": args.out.name}, row_values, environment=environment
            ),
        )
    return 0 if all(not row.reason for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
