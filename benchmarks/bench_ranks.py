"""Whether ranks agree: DDP, FSDP2 and tensor parallelism on N devices, each rank with an empty
cache of its own, one search for all.

Every rank is a process with its own device (nccl, or gloo on the CPU) and its own cache folder. All
ranks run what the first one finds: a row is "ok" if there was an agreement, every rank reports the
same digests, no other rank searched, and the results are those of the same model without this
package. `swapped` counts the regions that run something other than a baseline. It measures no
speed: the seconds are the cost of agreeing, the search included. The scenes of a run share the
caches: a later one may find what an earlier one searched.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torch_cudal1
from benchmarks import report
from torch_cudal1.api.backend import cudal1
from torch_cudal1.core import telemetry

__all__ = ["Scene", "compare_ranks", "main"]

_ROOT = Path(__file__).resolve().parent.parent
_SIZES = {"cuda": (1024, 2048), "cpu": (256, 1024)}  # rows of a batch, features
_MAX_RELATIVE_ERROR = 1e-3  # of the largest element: sums over ranks are taken in another order


class Scaled(nn.Module):
    """A product with a diagonal matrix, which a rewrite turns into a broadcast: every search finds
    this one.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ torch.diag(self.scale))


class Block(nn.Module):
    """Two layers with `Scaled` between them."""

    def __init__(self, features: int, between: int) -> None:
        super().__init__()
        self.first, self.between, self.second = (
            nn.Linear(features, features),
            Scaled(between),
            nn.Linear(features, features),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.between(self.first(x)))
        return result


@dataclass(frozen=True)
class Scene:
    """One line of the results: what all ranks report about one way to distribute a model."""

    devices: int
    backend: str
    scene: str
    status: Literal["ok", "failed"]
    reason: str = ""
    runs: Sequence[str] = ()  # agreement by agreement, what runs as a whole
    digests: Sequence[str] = ()  # of the choices for its regions
    swapped: int = 0  # regions that run something other than a baseline, on the first rank
    searched: Sequence[int] = ()  # regions that each rank searched
    # the largest difference to the model without this package, over its largest element
    error: float | None = None
    seconds: Sequence[float] = ()  # until the first answer, rank by rank


def compare_ranks(
    devices: int, backend: str, scene: str, rank_reports: Sequence[Mapping[str, Any]]
) -> Scene:
    """One row of all ranks' reports."""
    first, *other_reports = rank_reports
    reasons = [
        "" if first["agreements"] else "nothing was agreed upon",
        *(
            f"rank {number} does not run what rank 0 runs"
            for number, rank_report in enumerate(other_reports, 1)
            if list_agreements(rank_report) != list_agreements(first)
        ),
        *(
            f"rank {number} searched too"
            for number, rank_report in enumerate(other_reports, 1)
            if rank_report["searched"]
        ),
        *(
            f"rank {number} differs by {rank_report['error']:.2g}"
            for number, rank_report in enumerate(rank_reports)
            if not rank_report["error"] <= _MAX_RELATIVE_ERROR
        ),
        *(
            f"rank {number} fell back"
            for number, rank_report in enumerate(rank_reports)
            if rank_report["fallbacks"]
        ),
    ]
    reason = next(filter(None, reasons), "")
    return Scene(
        devices,
        backend,
        scene,
        "failed" if reason else "ok",
        reason,
        runs=[agreement["runs"] for agreement in first["agreements"]],
        digests=[digest for agreement in first["agreements"] for digest in agreement["digests"]],
        swapped=first["swapped"],
        searched=[rank_report["searched"] for rank_report in rank_reports],
        error=None
        if any(math.isnan(rank_report["error"]) for rank_report in rank_reports)
        else max(rank_report["error"] for rank_report in rank_reports),
        seconds=[round(rank_report["seconds"], 2) for rank_report in rank_reports],
    )


def list_agreements(rank_report: Mapping[str, Any]) -> list[Any]:
    """One rank's agreements: the deciding rank, what runs as a whole, the digests."""
    return [
        [agreement["leader"], agreement["runs"], agreement["digests"]]
        for agreement in rank_report["agreements"]
    ]


@dataclass(frozen=True)
class RankContext:
    """One rank: its number, its device, its folder."""

    rank: int
    world: int
    kind: str
    folder: Path
    budget_s: float

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank) if self.kind == "cuda" else torch.device("cpu")

    @property
    def mesh(self) -> Any:
        return init_device_mesh(self.kind, (self.world,))

    def options(self) -> dict[str, Any]:
        """An empty cache of its own, and a search allowed to the rank that decides."""
        cache = self.folder / f"cache-{self.rank}"
        return {
            "cache_dir": cache,
            "on_miss": "tune",
            "budget_s": self.budget_s,
            "ranks_timeout_s": 60.0,
            "strictness": "warn",
        }

    def block(self, *, parts: int = 1) -> Block:
        torch.manual_seed(0)
        features = _SIZES[self.kind][1]
        return Block(features, features // parts).to(self.device)

    def batch(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(_SIZES[self.kind], generator=generator).to(self.device)


# --- the scenes: each gives what its rank computes with this package, and what it computes without


def data_parallel(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
    """A training step inside DDP, each rank with its own batch: the gradients that all ranks share."""
    module, plain = context.block(), context.block()
    torch_cudal1.accelerate(module, context.batch(context.rank), **context.options())
    return _compute_gradient(DistributedDataParallel(module), module, context), _compute_gradient(
        DistributedDataParallel(plain), plain, context
    )


def fully_sharded(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks compiled with the backend, then sharded by FSDP2: the first layer's gradient of a
    training step.
    """
    module, plain = context.block(), context.block()
    module.compile(backend=cudal1, options=context.options())
    fully_shard(module, mesh=context.mesh)
    fully_shard(plain, mesh=context.mesh)
    return _compute_gradient(module, module, context), _compute_gradient(plain, plain, context)


def tensor_parallel(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Layers split over the ranks. The module between them gets plain tensors, a share of the
    features each, and is accelerated.
    """
    plans = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    module, plain = context.block(parts=context.world), context.block(parts=context.world)
    parallelize_module(module, context.mesh, plans)
    parallelize_module(plain, context.mesh, plans)
    with torch.no_grad():
        part = torch.zeros(
            _SIZES[context.kind][0], _SIZES[context.kind][1] // context.world, device=context.device
        )
        torch_cudal1.accelerate(module.between, part, **context.options())
        return module(context.batch(0)), plain(context.batch(0))


def _compute_gradient(wrapped: nn.Module, module: nn.Module, context: RankContext) -> torch.Tensor:
    wrapped(context.batch(context.rank)).square().mean().backward()
    gradient = module.first.weight.grad  # type: ignore[union-attr]
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient  # type: ignore[return-value]


SCENES: tuple[Callable[[RankContext], tuple[torch.Tensor, torch.Tensor]], ...] = (
    data_parallel,
    fully_sharded,
    tensor_parallel,
)


def _run_scene(
    scene: Callable[[RankContext], tuple[torch.Tensor, torch.Tensor]], context: RankContext
) -> dict[str, Any]:
    telemetry.reset()
    torch._dynamo.reset()
    dist.barrier()
    begin = time.monotonic()
    outputs, expected = scene(context)
    telemetry_report = torch_cudal1.report()
    return {
        "agreements": [
            dict(event.facts) for event in telemetry_report.events if event.what == "agreed"
        ],
        "swapped": telemetry_report.counters.get("regions_swapped", 0),
        "searched": telemetry_report.counters.get("regions_tuned", 0),
        "fallbacks": telemetry_report.counters.get("fallbacks", 0),
        "error": float((outputs - expected).abs().max() / expected.abs().max()),
        "seconds": time.monotonic() - begin,
    }


def _run_rank(args: argparse.Namespace) -> int:
    """One rank: run every scene and write its report as a file."""
    faulthandler.dump_traceback_later(args.time_limit_s, exit=True)
    context = RankContext(args.rank, args.counts[0], args.kind, args.folder, args.budget_s)
    limit = timedelta(seconds=args.time_limit_s)
    store = TCPStore("127.0.0.1", args.port, None, is_master=False, timeout=limit)
    if context.kind == "cuda":
        torch.cuda.set_device(context.device)
    dist.init_process_group(
        _backend(context.kind),
        store=store,
        rank=context.rank,
        world_size=context.world,
        timeout=limit,
    )
    for scene in SCENES:
        (context.folder / f"{scene.__name__}-{context.rank}.json").write_text(
            json.dumps(_run_scene(scene, context), default=str)
        )
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _backend(kind: str) -> str:
    return "nccl" if kind == "cuda" else "gloo"


def _measure_world(args: argparse.Namespace, world: int) -> list[Scene]:
    """The scenes on `world` devices."""
    if args.kind == "cuda" and torch.cuda.device_count() < world:
        reason = f"needs {world} GPUs, torch finds {torch.cuda.device_count()}"
        return [
            Scene(world, _backend(args.kind), scene.__name__, "failed", reason) for scene in SCENES
        ]
    with tempfile.TemporaryDirectory(prefix="cudal1-ranks-", ignore_cleanup_errors=True) as scratch:
        return _launch_ranks(args, world, Path(scratch))


def _launch_ranks(args: argparse.Namespace, world: int, scratch: Path) -> list[Scene]:
    """A row for each scene, from the reports of all ranks or the reason why one of them did not
    end.
    """
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    environment = dict(os.environ) | {
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(_ROOT), environment.get("PYTHONPATH", "")])
    )
    environment |= {"GLOO_SOCKET_IFNAME": "lo"} if args.kind == "cpu" else {}
    options = {
        "kind": args.kind,
        "counts": world,
        "budget-s": args.budget_s,
        "time-limit-s": args.time_limit_s,
    }
    options |= {"port": store.port, "folder": scratch}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.bench_ranks", *words]
    processes = []
    for rank in range(world):
        with (scratch / f"errors-{rank}").open("wb") as errors:
            processes.append(
                subprocess.Popen(
                    [*command, "--rank", str(rank)],
                    cwd=_ROOT,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
            )
    failure = ""
    try:
        codes = [process.wait(timeout=args.time_limit_s + 30) for process in processes]
    except subprocess.TimeoutExpired:
        codes, failure = [], f"time limit of {args.time_limit_s:.0f} s"
    finally:
        for process in processes:
            process.kill()
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is not None:
        log = (scratch / f"errors-{failed}").read_text(errors="replace")
        failure = f"rank {failed} ended with code {codes[failed]}: {_last_error_line(log)}"
    return [
        _make_row(world, _backend(args.kind), scene.__name__, scratch, failure) for scene in SCENES
    ]


def _last_error_line(errors: str) -> str:
    print(errors[-4000:], file=sys.stderr)
    lines = errors.strip().splitlines() or [""]
    return next((line for line in lines if line.startswith("Timeout (")), lines[-1])[:300]


def _make_row(world: int, backend: str, scene: str, scratch: Path, failure: str) -> Scene:
    files = [scratch / f"{scene}-{rank}.json" for rank in range(world)]
    if all(file.exists() for file in files):
        return compare_ranks(
            world, backend, scene, [json.loads(file.read_text()) for file in files]
        )
    return Scene(world, backend, scene, "failed", failure or "a rank left nothing behind")


def main(argv: Sequence[str] | None = None) -> int:
    """Every scene on every number of devices; 0 when all rows are "ok"."""
    args = _parser().parse_args(argv)
    if args.rank is not None:
        return _run_rank(args)
    environment, rows = report.environment(), []
    print(json.dumps(environment), flush=True)
    options = {name: getattr(args, name) for name in ("kind", "counts", "budget_s")}
    for world in args.counts:
        for row in _measure_world(args, world):
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
        report.save(
            args.out,
            report.make_document(
                "ranks", options, [asdict(row) for row in rows], environment=environment
            ),
        )
    return 0 if all(row.status == "ok" for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_ranks", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--kind", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu")
    parser.add_argument(
        "--counts",
        type=_counts,
        default=(2, 4) if gpus >= 4 else (2,),
        help="devices of each run, such as 2,4",
    )
    parser.add_argument("--budget-s", type=float, default=10.0, help="the search budget per region")
    parser.add_argument(
        "--time-limit-s",
        type=float,
        default=120.0,
        help="per run; then a rank says where it stands",
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "results" / "ranks.json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected numbers of devices from 2 on, such as 2,4"
        )
    return counts


if __name__ == "__main__":
    sys.exit(main())
