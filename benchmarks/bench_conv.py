"""Convolutions: the package's most promising kernels against PyTorch's own (cuDNN), device time and
error against float64.

    python -m benchmarks.bench_conv [--processes 16] [--per-case 4] [--only NAME] [--budget-s 120] [--out conv.json]

Candidates are compiled first, by many processes at once, then timed on the device one after the
other. PyTorch is timed before them with its default flags, which let cuDNN use TF32. Errors are
those of the first image, rms in units of the result's rms. `floor_us`, a lower bound: input and
output moved once at 4.2 TB/s. The benchmark validates nothing: the checks of a swap are in
`torch_cudal1/judge`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.judge.benchmark.timing import measure_device_time_us
from torch_cudal1.judge.wire.transport import read_program, write_payloads
from torch_cudal1.kernels.expr.affine import row_major
from torch_cudal1.runtime.executor import prepare

__all__ = ["CASES", "ConvCase", "main"]

_MEMORY_BYTES_PER_US = 4.2e6
_TIMED_CALLS = 5


@dataclass(frozen=True)
class ConvCase:
    """A convolution of `x` (images, channels, axes) with `w`, in ATen's terms; a parameter has one
    number per axis, or one for all.
    """

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    transposed: bool = False
    groups: int = 1
    tail: str = ""  # or "mish"

    def run(self, x: Tensor, w: Tensor) -> Tensor:
        """The same computation in plain PyTorch."""
        rank = len(self.x) - 2
        geometry = [
            (numbers * rank)[:rank] for numbers in (self.stride, self.padding, self.dilation)
        ]
        outputs = torch.ops.aten.convolution.default(
            x, w, None, *geometry, self.transposed, [0] * rank, self.groups
        )
        return torch.nn.functional.mish(outputs) if self.tail else outputs

    def program(self) -> Program:
        """The ATen steps."""
        rank = len(self.x) - 2
        geometry = tuple(
            (numbers * rank)[:rank] for numbers in (self.stride, self.padding, self.dilation)
        )
        specs = tuple(
            TensorSpec("float32", shape, row_major(shape), "cuda") for shape in (self.x, self.w)
        )
        args = (Value(0), Value(1), None, *geometry, self.transposed, (0,) * rank, self.groups)
        steps = [Aten("aten.convolution.default", args, (), (2,))]
        if self.tail:
            steps.append(Aten("aten.mish.default", (Value(2),), (), (3,)))
        return Program(specs, tuple(steps), (steps[-1].outs[0],))


CASES = (
    ConvCase("3x3, 64 to 128", (64, 64, 128, 128), (128, 64, 3, 3)),
    ConvCase("3x3, 16 to 128, large", (4, 16, 1024, 1024), (128, 16, 3, 3)),
    ConvCase("3x3, 64 to 64, mish", (32, 64, 128, 128), (64, 64, 3, 3), padding=(1,), tail="mish"),
    ConvCase(
        "11x11 stride 4, 3 to 96", (128, 3, 224, 224), (96, 3, 11, 11), stride=(4,), padding=(2,)
    ),
    ConvCase(
        "5x9 dilated, 32 to 64", (8, 32, 512, 512), (64, 32, 5, 9), padding=(2, 4), dilation=(2, 3)
    ),
    ConvCase("1x1, 64 to 128", (8, 64, 512, 512), (128, 64, 1, 1)),
    ConvCase(
        "1-D, 64 to 128, stride 3", (32, 64, 131072), (128, 64, 3), stride=(3,), dilation=(4,)
    ),
    ConvCase("3x3x3, 8 to 32", (64, 8, 32, 64, 64), (32, 8, 3, 3, 3)),
    ConvCase("3x5x7, 3 to 64", (16, 3, 64, 64, 64), (64, 3, 3, 5, 7)),
    ConvCase("transposed 3x3, 64 to 64", (8, 64, 512, 512), (64, 64, 3, 3), transposed=True),
    ConvCase(
        "transposed 3x3 stride 2, 64 to 64",
        (32, 64, 128, 128),
        (64, 64, 3, 3),
        (2,),
        (1,),
        transposed=True,
    ),
    ConvCase("transposed 3x3x3, 48 to 48", (8, 48, 64, 64, 64), (48, 48, 3, 3, 3), transposed=True),
    ConvCase(
        "transposed 3x3x3 stride 2, 64 to 128",
        (4, 64, 24, 48, 48),
        (64, 128, 3, 3, 3),
        (2,),
        (1,),
        transposed=True,
    ),
    ConvCase(
        "transposed 3x5x7 stride 2, groups",
        (8, 32, 12, 24, 48),
        (32, 8, 3, 5, 7),
        (2,),
        (1, 2, 3),
        (1,),
        True,
        4,
    ),
    ConvCase("depthwise 3x3", (16, 64, 512, 512), (64, 1, 3, 3), groups=64),
    ConvCase("depthwise 3x7", (32, 128, 128, 256), (128, 1, 3, 7), groups=128),
)


def compile_proposal(
    case: ConvCase, config: Mapping[str, Any], sm: int, path: Path
) -> dict[str, Any]:
    """The Program of a proposal as JSON and a file, or the reason why it does not compile. Runs in
    a process of the pool.
    """
    from torch_cudal1.kernels import Proposal, build

    torch.set_num_threads(1)
    try:
        program = build(case.program(), Proposal("conv", dict(config)), sm)
    except (Cudal1Error, OSError) as error:
        return {"failed": " ".join(str(error).split())[:300]}
    return {"program": program.to_json(), "payloads": write_payloads(program, path)}


class ConvMeasurer:
    """The inputs of one case on a device, and their float64 result."""

    def __init__(self, case: ConvCase, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.case, self.device = case, device
        self.inputs = [
            torch.randn(shape, generator=generator, device=device) for shape in (case.x, case.w)
        ]
        x, w = self.inputs
        self.exact = case.run(x[:1].double(), w.double())

    def row(self, name: str, run: Any) -> dict[str, Any]:
        """Error of the first image, then device time."""
        first_image = run()[:1].double()
        error = float(
            (first_image - self.exact).pow(2).mean().sqrt() / self.exact.pow(2).mean().sqrt()
        )
        us = measure_device_time_us(run, self.device, calls=_TIMED_CALLS)
        return {"case": self.case.name, "name": name, "device_us": round(us, 1), "rms": error}

    def eager(self) -> dict[str, Any]:
        """PyTorch's own, and the time that its memory traffic takes at least."""
        outputs = self.case.run(*self.inputs)
        moved_bytes = 4 * (self.inputs[0].numel() + outputs.numel())
        row = self.row("eager", lambda: self.case.run(*self.inputs))
        return row | {"floor_us": round(moved_bytes / _MEMORY_BYTES_PER_US, 1)}

    def candidate(
        self, config: Mapping[str, Any], built: Mapping[str, Any], eager_us: float
    ) -> dict[str, Any]:
        """A kernel's row, or why there is none."""
        name = " ".join(f"{k}={v}" for k, v in config.items())
        if "failed" in built:
            return {"case": self.case.name, "name": name, "failed": built["failed"]}
        try:
            runner = prepare(read_program(built["program"], built["payloads"]), self.device)
            row = self.row(name, lambda: runner(list(self.inputs))[0])
        except Cudal1Error as error:
            return {"case": self.case.name, "name": name, "failed": str(error)[:300]}
        return row | {
            "speedup": round(eager_us / row["device_us"], 3) if row["device_us"] else None
        }


def list_configs(case: ConvCase, sm: int, per_case: int) -> list[dict[str, Any]]:
    """The configurations to try: half in TF32, half exact, where both exist."""
    from torch_cudal1.kernels import propose

    return [dict(p.config) for p in propose(case.program(), sm, ("conv",), most=per_case)]


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, measure, print, write; 1 when a candidate did not compile or run."""
    parser = argparse.ArgumentParser(
        prog="bench_conv", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--per-case", type=int, default=4)
    parser.add_argument("--only", action="append", default=[], help="cases whose name holds this")
    parser.add_argument(
        "--budget-s", type=float, default=120.0, help="cases that begin later are left out"
    )
    parser.add_argument("--out", type=Path, default=Path("conv.json"))
    args = parser.parse_args(argv)
    begin, environment = time.monotonic(), report.environment()
    major, minor = environment["capability"] or (9, 0)
    cases = [
        case for case in CASES if not args.only or any(word in case.name for word in args.only)
    ]
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="cudal1-conv-") as folder,
        ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool,
    ):
        submitted_by_case: dict[str, list[tuple[dict[str, Any], Future[dict[str, Any]]]]] = {}
        for case in cases:
            configs = list_configs(case, 10 * major + minor, args.per_case)
            paths = [Path(folder) / f"{len(submitted_by_case)}-{i}" for i in range(len(configs))]
            submitted = [
                pool.submit(compile_proposal, case, c, 10 * major + minor, path)
                for c, path in zip(configs, paths, strict=True)
            ]
            submitted_by_case[case.name] = list(zip(configs, submitted, strict=True))
        for case in cases:
            built = [(config, future.result()) for config, future in submitted_by_case[case.name]]
            if time.monotonic() - begin > args.budget_s:
                rows.append({"case": case.name, "name": "eager", "failed": "the budget was spent"})
            else:
                rows += _measure_case(case, built, cuda=bool(environment["gpu"]))
            print(
                "\n".join(map(_format_row, (row for row in rows if row["case"] == case.name))),
                flush=True,
            )
    options = {"per_case": args.per_case, "budget_s": args.budget_s}
    shown = {case.name: asdict(case) for case in cases}
    report.save(
        args.out, report.make_document("conv", options, rows, environment=environment, cases=shown)
    )
    return int(any("failed" in row for row in rows))


def _measure_case(
    case: ConvCase, built: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], *, cuda: bool
) -> list[dict[str, Any]]:
    if not cuda:
        return [{"case": case.name, "name": "eager", "failed": "no GPU to measure on"}]
    measurer = ConvMeasurer(case, torch.device("cuda"))
    eager = measurer.eager()
    rows = [
        eager,
        *(measurer.candidate(config, build, eager["device_us"]) for config, build in built),
    ]
    del measurer
    torch.cuda.empty_cache()
    return rows


def _format_row(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{row['case']:40} {row['name'][:90]:90} {row['failed'][:120]}"
    note = f"floor {row['floor_us']:.0f} us" if "floor_us" in row else f"{row['speedup']:.2f}x"
    return f"{row['case']:40} {row['name'][:90]:90} {row['device_us']:9.1f} us rms {row['rms']:.1e} {note}"


if __name__ == "__main__":
    sys.exit(main())
