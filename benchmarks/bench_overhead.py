"""Host microseconds per call: what calling costs before the device does anything, for eager, compiled and accelerated modules.

    python -m benchmarks.bench_overhead [--device cpu] [--calls 2000] [--out overhead.json]

Inference mode; each row is the median of `--calls` single calls after a warm-up, less what reading the clock costs. The device is
waited for between batches of 10 calls (of one, for BERT), untimed: it is idle when they begin, and no call waits for a place in its
queue. Every contender's answer is compared with eager's first. A contender that cannot run is a row with its reason. Small tensors:
the device's work is not the subject.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks import bound, models, report
from torch_cudal1 import native
from torch_cudal1.program.execute import prepare

__all__ = ["Row", "main", "measure"]

Call: TypeAlias = Callable[[], Any]
_WARM_CALLS = 200
_BATCH = 10  # calls between two waits for the device: so few that none waits for a place in its queue
_CHAIN = (1, 2, 4, 8)  # launches in a Program; the slope is what a further one costs


@dataclass(frozen=True)
class Row:
    """One contender: median, 10th and 90th percentile of host microseconds, or why there is none ("" if there is)."""

    name: str
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    reason: str = ""


class Relu(nn.Module):
    """relu, the smallest module there is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


class Three(nn.Module):
    """Three operators: relu(b + x @ w.T)."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(wide, wide)), nn.Parameter(torch.randn(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.addmm(self.b, x, self.w.t()))


def measure(call: Call, calls: int, wait: Call, batch: int = _BATCH) -> tuple[float, float, float]:
    """(median, 10th, 90th percentile) microseconds of one call; the device is idle at the first of each `batch`."""
    for _ in range(_WARM_CALLS):
        call()
    wait()
    samples: list[int] = []
    clock: list[int] = []
    while len(samples) < calls:
        for _ in range(min(batch, calls - len(samples))):
            begin = time.perf_counter_ns()
            kept = call()
            end = time.perf_counter_ns()
            del kept
            samples.append(end - begin)
            clock.append(-(end - time.perf_counter_ns()))
        wait()
    own = statistics.median(clock)
    cuts = statistics.quantiles(samples, n=10)
    return tuple(max(0.0, ns - own) / 1e3 for ns in (statistics.median(samples), cuts[0], cuts[-1]))  # type: ignore[return-value]


def contenders(device: torch.device) -> Iterator[tuple[str, Callable[[], tuple[Call, torch.Tensor]]]]:
    """(name, how to make the call and what it should yield); made one after the other, so that a failure costs one row."""
    x = torch.randn(4096, device=device)
    yield "eager: function, relu", lambda: (lambda: torch.relu(x), torch.relu(x))
    yield "eager: nn.Module, relu", lambda: _module(Relu(), x)
    yield "eager: nn.Module, three operators", lambda: _three(device, "")
    yield "accelerated: three operators", lambda: _three(device, "eager")
    yield "accelerated: three operators, Python executor", lambda: _three(device, "python")
    yield "torch.compile: relu", lambda: _module(torch.compile(Relu()), x)
    if device.type == "cpu":
        return
    yield "torch.compile: relu, reduce-overhead", lambda: _module(torch.compile(Relu(), mode="reduce-overhead"), x)
    yield "Triton: launch, relu", lambda: _triton(x, allocate=False)
    yield "Triton: empty_like and launch, relu", lambda: _triton(x, allocate=True)
    for launches in _CHAIN:
        yield f"accelerated: launches, {launches}", lambda launches=launches: _launches(x, launches)  # type: ignore[misc]
    yield "accelerated: launches, 1, result held", lambda: _held(_launches(x, 1))
    yield "executor alone: launches, 1", lambda: _executor(x)
    yield "CUDA graph: replay, relu", lambda: _replay(Relu(), x)
    bert, (tokens,) = models.bert_base_b1(device=str(device))
    yield "CUDA graph: replay, BERT-base b1", lambda: _replay(bert, tokens)
    yield "accelerated: BERT-base b1, CUDA graph", lambda: _module(bound.whole(bert, (tokens,), "eager+graph"), tokens, bert)
    yield (
        "accelerated: BERT-base b1, CUDA graph, result held",
        lambda: _held(_module(bound.whole(bert, (tokens,), "eager+graph"), tokens, bert)),
    )
    yield "accelerated: BERT-base b1, step by step", lambda: _module(bound.whole(bert, (tokens,), "eager"), tokens, bert)
    yield "eager: BERT-base b1", lambda: _plain(bert, tokens)
    yield "torch.compile: BERT-base b1, reduce-overhead", lambda: _compiled_bert(bert, tokens)


def _module(module: Any, x: torch.Tensor, plain: nn.Module | None = None) -> tuple[Call, torch.Tensor]:
    own = plain or getattr(module, "_orig_mod", module)
    return lambda: module(x), own._call_impl(x)


def _held(made: tuple[Call, torch.Tensor]) -> tuple[Call, torch.Tensor]:
    """The same call by someone who lets go of a result when the next one is there: each lies elsewhere than the last."""
    call, expected = made
    kept: list[Any] = [None]

    def held() -> Any:
        kept[0] = call()
        return kept[0]

    return held, expected


def _plain(module: nn.Module, x: torch.Tensor) -> tuple[Call, torch.Tensor]:
    module._compiled_call_impl = None
    return _module(module, x)


def _compiled_bert(bert: nn.Module, tokens: torch.Tensor) -> tuple[Call, torch.Tensor]:
    bert._compiled_call_impl = None
    return _module(torch.compile(bert, mode="reduce-overhead"), tokens)


def _three(device: torch.device, schedule: str) -> tuple[Call, torch.Tensor]:
    module, x = Three(8).to(device), torch.randn(3, 8, device=device)
    return _module(bound.whole(module, (x,), schedule) if schedule else module, x)


def _launches(x: torch.Tensor, launches: int) -> tuple[Call, torch.Tensor]:
    runner = prepare(bound.chain(x, launches), x.device)
    return _module(bound.bind_to(Relu(), (x,), runner, (0,)), x)


def _executor(x: torch.Tensor) -> tuple[Call, torch.Tensor]:
    runner, inputs = prepare(bound.chain(x, 1), x.device), [x]
    return lambda: runner(inputs)[0], torch.relu(x)


def _triton(x: torch.Tensor, *, allocate: bool) -> tuple[Call, torch.Tensor]:
    kernel, out, grid = bound.relu_kernel(x.device)[2], torch.empty_like(x), (-(-x.numel() // 1024),)

    def call() -> torch.Tensor:
        result = torch.empty_like(x) if allocate else out
        kernel[grid](x, result, x.numel(), BLOCK=1024)
        return result

    return call, torch.relu(x)


def _replay(module: nn.Module, x: torch.Tensor) -> tuple[Call, torch.Tensor]:
    module._compiled_call_impl = None
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            module(x)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x)

    def call() -> torch.Tensor:
        graph.replay()
        return out

    return call, module(x)


def measured(name: str, make: Callable[[], tuple[Call, torch.Tensor]], calls: int, wait: Call) -> Row:
    """The row of one contender."""
    try:
        call, expected = make()
        call()
        torch.testing.assert_close(
            call(), expected, rtol=1e-2, atol=1e-3
        )  # it computes the same thing; accuracy is judged elsewhere
        return Row(name, *measure(call, calls, wait, 1 if "BERT" in name else _BATCH))
    except Exception as error:  # noqa: BLE001  a contender that fails is a row
        return Row(name, reason=f"{type(error).__name__}: {error}".splitlines()[0])


def conclusions(rows: Sequence[Row]) -> dict[str, float]:
    """What the rows say about our own cost: microseconds for each further launch, and times of bare graph replay."""
    us = {row.name: row.median_us for row in rows if row.median_us is not None}
    found: dict[str, float] = {}
    first, last = (us.get(f"accelerated: launches, {count}") for count in (_CHAIN[0], _CHAIN[-1]))
    if first is not None and last is not None:
        found["further_launch_us"] = (last - first) / (_CHAIN[-1] - _CHAIN[0])
    ratios = {
        "bert_over_bare_replay": ("accelerated: BERT-base b1, CUDA graph", "CUDA graph: replay, BERT-base b1"),
        "three_operators_over_eager": ("accelerated: three operators", "eager: nn.Module, three operators"),
    }
    for name, (ours, base) in ratios.items():
        if ours in us and base in us:
            found[name] = us[ours] / us[base]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every contender; 0 if none failed."""
    parser = argparse.ArgumentParser(prog="bench_overhead", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=2_000)
    parser.add_argument("--only", default="", help="measure contenders whose name holds this")
    parser.add_argument("--out", type=Path, default=Path("overhead.json"))
    args = parser.parse_args(argv)
    device = torch.device(args.device, 0 if args.device == "cuda" else None)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cpu":
        torch.set_num_threads(1)  # waking other threads costs more than these calls
    environment, rows = {**report.environment(), "extension": native.status()[1] or "used"}, []
    with torch.inference_mode():
        for name, make in contenders(device):
            if args.only in name:
                rows.append(measured(name, make, args.calls, wait))
                us = "-" if rows[-1].median_us is None else f"{rows[-1].median_us:.2f} us"
                print(f"{name:48} {us:>12}  {rows[-1].reason}", flush=True)
    options = {"device": device.type, "calls": args.calls}
    found = conclusions(rows)
    report.save(
        args.out, report.document("overhead", options, [asdict(row) for row in rows], environment=environment, summary=found)
    )
    print(json.dumps({"out": args.out.name, "summary": found}))
    return 0 if all(not row.reason for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
