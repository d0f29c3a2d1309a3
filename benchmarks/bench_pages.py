"""What page faults cost on the CPU: one multiplication with a large result, by PyTorch and as a
Program whose result lies in huge pages.

    python -m benchmarks.bench_pages [--mib 16,64,256] [--budget-s 5] [--out pages.json]

Both call the same operator on the same inputs, in turns. Results of 32 MiB and less are the
control: the package asks for no huge pages for those. `transparent_hugepage` records whether the
machine has them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import environment, make_document, save
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.judge.benchmark.protocol import sample_pairs
from torch_cudal1.judge.benchmark.statistics import summarise
from torch_cudal1.runtime.executor import prepare

__all__ = ["main", "measure_size"]

_CPU = torch.device("cpu")
_ADVICE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def measure_size(mib: int, *, budget_s: float) -> dict[str, Any]:
    """Medians in microseconds and the speed-up with its interval for a float32 result of `mib` MiB."""
    inputs, factor = torch.ones(mib << 18), torch.full((1,), 2.0)
    program = Program(
        (TensorSpec.of(inputs), TensorSpec.of(factor)),
        (Aten("aten.mul.Tensor", (Value(0), Value(1)), (), (2,), False),),
        (2,),
    )
    run = prepare(program, _CPU)
    (result,) = run([inputs, factor])
    assert result is not None
    right = bool(torch.equal(result, inputs * factor))
    summary = summarise(
        sample_pairs(
            lambda: inputs * factor, lambda: run([inputs, factor]), _CPU, budget_s=budget_s
        )
    )
    row = {
        "mib": mib,
        "status": "ok" if right else "wrong",
        "pytorch_us": summary.a_us,
        "program_us": summary.b_us,
    }
    return row | {"speedup": summary.speedup, "low": summary.low, "high": summary.high}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every size; 0 if all results were right."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_pages", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--mib", default="16,64,256", help="sizes of the result, comma-separated")
    parser.add_argument("--budget-s", type=float, default=5.0, help="of timing, for each size")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    advice = _ADVICE.read_text(encoding="ascii").strip() if _ADVICE.exists() else "absent"
    print(f"transparent huge pages: {advice}")
    rows = []
    for mib in map(int, args.mib.split(",")):
        rows.append(row := measure_size(mib, budget_s=args.budget_s))
        interval = f"{row['speedup']:.2f}x [{row['low']:.2f}, {row['high']:.2f}]"
        print(
            f"{mib:4} MiB  PyTorch {row['pytorch_us']:9.0f} us  Program {row['program_us']:9.0f} us  {interval}  {row['status']}"
        )
    if args.out is not None:
        options = {"mib": args.mib, "budget_s": args.budget_s}
        save(
            args.out,
            make_document(
                "pages", options, rows, environment=environment(), transparent_hugepage=advice
            ),
        )
    return 0 if all(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
