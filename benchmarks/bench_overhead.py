"""Host microseconds per call: what calling costs before the device does anything, for eager,
compiled and accelerated modules.

    python -m benchmarks.bench_overhead [--device cpu] [--calls 2000] [--out overhead.json]

Inference mode; each row is the median of `--calls` single calls after a warm-up, less what reading
the clock costs. The device is waited for between batches of 10 calls (of one, for BERT), untimed:
it is idle when they begin, and no call waits for a place in its queue. What is compared as a ratio
of host times, the three operators, takes turns batch by batch, so that both meet the same load of
the machine. Every contender's answer is compared with eager's first. A contender that cannot run is
a row with its reason. Small tensors: the device's work is not the subject.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks import bound, models, report
from torch_cudal1.core import native
from torch_cudal1.runtime.executor import prepare

__all__ = ["Row", "main", "measure"]

Call: TypeAlias = Callable[[], Any]
Made: TypeAlias = tuple[Call, torch.Tensor]  # a call and what it should yield
Group: TypeAlias = list[tuple[str, Callable[[], Made]]]  # name, how to make it; a group takes turns
_WARM_CALLS = 200
_BATCH = (
    10  # calls between two waits for the device: so few that none waits for a place in its queue
)
_CHAIN = (1, 2, 4, 8)  # launches in a Program; the slope is what a further one costs


@dataclass(frozen=True)
class Row:
    """One contender: median, 10th and 90th percentile of host microseconds, or why there is none
    ("" if there is).
    """

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


def measure(
    calls: Sequence[Call], count: int, wait: Call, batch: int = _BATCH
) -> list[tuple[float, float, float]]:
    """(median, 10th, 90th percentile) microseconds of `count` calls of each, in turns of `batch`
    calls begun on an idle device.
    """
    for call in calls:
        for _ in range(_WARM_CALLS):
            call()
    wait()
    samples: list[list[int]] = [[] for _ in calls]
    clock: list[int] = []
    while len(samples[-1]) < count:
        for call, seen in zip(calls, samples, strict=True):
            for _ in range(min(batch, count - len(seen))):
                begin = time.perf_counter_ns()
                kept = call()
                end = time.perf_counter_ns()
                del kept
                seen.append(end - begin)
                clock.append(-(end - time.perf_counter_ns()))
            wait()
    own = statistics.median(clock)
    return [_percentiles(seen, own) for seen in samples]


def _percentiles(samples: Sequence[int], own: float) -> tuple[float, float, float]:
    cuts = statistics.quantiles(samples, n=10)
    median, p10, p90 = (
        max(0.0, ns - own) / 1e3 for ns in (statistics.median(samples), cuts[0], cuts[-1])
    )
    return median, p10, p90


def contenders(device: torch.device) -> Iterator[Group]:
    """Groups of contenders, each made when its turn has come, so that a failure costs one row."""
    x = torch.randn(4096, device=device)
    yield [("eager: function, relu", lambda: (lambda: torch.relu(x), torch.relu(x)))]
    yield [("eager: nn.Module, relu", lambda: _module(Relu(), x))]
    yield [
        ("eager: nn.Module, three operators", lambda: _three(device, "")),
        ("accelerated: three operators", lambda: _three(device, "eager")),
        ("accelerated: three operators, Python executor", lambda: _three(device, "python")),
    ]
    yield [("torch.compile: relu", lambda: _module(torch.compile(Relu()), x))]
    if device.type == "cuda":
        yield from _small_on_gpu(x)
        yield from _bert_on_gpu(device)


def _small_on_gpu(x: torch.Tensor) -> Iterator[Group]:
    yield [
        (
            "torch.compile: relu, reduce-overhead",
            lambda: _module(torch.compile(Relu(), mode="reduce-overhead"), x),
        )
    ]
    yield [("Triton: launch, relu", lambda: _triton(x, allocate=False))]
    yield [("Triton: empty_like and launch, relu", lambda: _triton(x, allocate=True))]
    for launches in _CHAIN:
        yield [
            (f"accelerated: launches, {launches}", lambda launches=launches: _launches(x, launches))
        ]  # type: ignore[misc]
    yield [("accelerated: launches, 1, result held", lambda: _held(_launches(x, 1), 1))]
    yield [("executor alone: launches, 1", lambda: _executor(x))]
    yield [("CUDA graph: replay, relu", lambda: _replay(Relu(), x))]


def _bert_on_gpu(device: torch.device) -> Iterator[Group]:
    bert, (tokens,) = models.bert_base_b1(device=str(device))

    def graphed() -> Made:
        return _module(bound.whole(bert, (tokens,), "eager+graph"), tokens, bert)

    yield [("CUDA graph: replay, BERT-base b1", lambda: _replay(bert, tokens))]
    yield [("accelerated: BERT-base b1, CUDA graph", graphed)]
    # Two places in turns, which both are known; and five, of which each is an update of the graph.
    yield [("accelerated: BERT-base b1, CUDA graph, result held", lambda: _held(graphed(), 1))]
    yield [
        ("accelerated: BERT-base b1, CUDA graph, four results held", lambda: _held(graphed(), 4))
    ]
    yield [
        (
            "accelerated: BERT-base b1, step by step",
            lambda: _module(bound.whole(bert, (tokens,), "eager"), tokens, bert),
        )
    ]
    yield [("eager: BERT-base b1", lambda: _plain(bert, tokens))]
    yield [("torch.compile: BERT-base b1, reduce-overhead", lambda: _compiled_bert(bert, tokens))]


def _module(module: Any, x: torch.Tensor, plain: nn.Module | None = None) -> Made:
    own = plain or getattr(module, "_orig_mod", module)
    return lambda: module(x), own._call_impl(x)


def _held(made: Made, results: int) -> Made:
    """The same call by someone who still has the last `results` when the next one is made: each
    lies elsewhere than those.
    """
    call, expected = made
    kept: deque[Any] = deque(maxlen=results)

    def held() -> Any:
        kept.append(call())
        return kept[-1]

    return held, expected


def _plain(module: nn.Module, x: torch.Tensor) -> Made:
    module._compiled_call_impl = None
    return _module(module, x)


def _compiled_bert(bert: nn.Module, tokens: torch.Tensor) -> Made:
    bert._compiled_call_impl = None
    return _module(torch.compile(bert, mode="reduce-overhead"), tokens)


def _three(device: torch.device, schedule: str) -> Made:
    module, x = Three(8).to(device), torch.randn(3, 8, device=device)
    return _module(bound.whole(module, (x,), schedule) if schedule else module, x)


def _launches(x: torch.Tensor, launches: int) -> Made:
    runner = prepare(bound.chain(x, launches), x.device)
    return _module(bound.bind_to(Relu(), (x,), runner, (0,)), x)


def _executor(x: torch.Tensor) -> Made:
    runner, inputs = prepare(bound.chain(x, 1), x.device), [x]
    return lambda: runner(inputs)[0], torch.relu(x)


def _triton(x: torch.Tensor, *, allocate: bool) -> Made:
    kernel, out, grid = (
        bound.relu_kernel(x.device)[2],
        torch.empty_like(x),
        (-(-x.numel() // 1024),),
    )

    def call() -> torch.Tensor:
        result = torch.empty_like(x) if allocate else out
        kernel[grid](x, result, x.numel(), BLOCK=1024)
        return result

    return call, torch.relu(x)


def _replay(module: nn.Module, x: torch.Tensor) -> Made:
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


def measured(group: Group, calls: int, wait: Call) -> list[Row]:
    """The rows of a group. One that cannot be made is a row with its reason, and the others are
    measured without it.
    """
    rows: dict[str, Row] = {}
    ready: dict[str, Call] = {}
    for name, make in group:
        try:
            call, expected = make()
            call()
            torch.testing.assert_close(
                call(), expected, rtol=1e-2, atol=1e-3
            )  # the same thing; accuracy is judged elsewhere
            ready[name] = call
        except Exception as error:  # noqa: BLE001  a contender that fails is a row
            rows[name] = _failed(name, error)
    try:
        batch = 1 if any("BERT" in name for name in ready) else _BATCH
        times = measure(tuple(ready.values()), calls, wait, batch) if ready else []
        rows |= {name: Row(name, *us) for name, us in zip(ready, times, strict=True)}
    except Exception as error:  # noqa: BLE001  as above
        rows |= {name: _failed(name, error) for name in ready}
    return [rows[name] for name, _ in group]


def _failed(name: str, error: Exception) -> Row:
    return Row(name, reason=f"{type(error).__name__}: {error}".splitlines()[0])


def conclusions(rows: Sequence[Row]) -> dict[str, float]:
    """What the rows say about our own cost: microseconds for each further launch, and ratios of
    host times.
    """
    us = {row.name: row.median_us for row in rows if row.median_us is not None}
    quiet = {row.name: row.p10_us for row in rows if row.p10_us is not None}
    found: dict[str, float] = {}
    first, last = (us.get(f"accelerated: launches, {count}") for count in (_CHAIN[0], _CHAIN[-1]))
    if first is not None and last is not None:
        found["further_launch_us"] = (last - first) / (_CHAIN[-1] - _CHAIN[0])
    bert, replay = "accelerated: BERT-base b1, CUDA graph", "CUDA graph: replay, BERT-base b1"
    ours, eager = "accelerated: three operators", "eager: nn.Module, three operators"
    ratios = {
        "bert_over_bare_replay": (us, bert, replay),
        "bert_held_over_bare_replay": (us, f"{bert}, result held", replay),
        "three_operators_over_eager": (us, ours, eager),
        "three_operators_over_eager_p10": (quiet, ours, eager),
    }
    found |= {
        name: of[one] / of[base]
        for name, (of, one, base) in ratios.items()
        if one in of and base in of
    }
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
    options, found = {"device": device.type, "calls": args.calls}, {}
    with torch.inference_mode():
        for group in contenders(device):
            for row in measured([one for one in group if args.only in one[0]], args.calls, wait):
                rows.append(row)
                us = "-" if row.median_us is None else f"{row.median_us:.2f} us"
                print(f"{row.name:58} {us:>12}  {row.reason}", flush=True)
            found = conclusions(rows)
            document = report.document(
                "overhead",
                options,
                [asdict(row) for row in rows],
                environment=environment,
                summary=found,
            )
            report.save(
                args.out, document
            )  # after each group: a run that is cut off keeps what it has
    print(json.dumps({"out": args.out.name, "summary": found}))
    return 0 if all(not row.reason for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
