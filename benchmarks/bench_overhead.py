"""Host microseconds per call: what a call costs before the device does anything, for eager,
compiled and accelerated modules.

    python -m benchmarks.bench_overhead [--device cpu] [--calls 2000] [--out overhead.json]

Inference mode. Each row is the median of `--calls` single calls after a warm-up, less what reading
the clock costs. Between batches of 10 calls (of one, for BERT) the benchmark waits for the device,
untimed: the device is idle when a batch begins, and no call waits for a place in its queue.
Contenders whose host times are compared as a ratio, the three operators, take turns batch by batch,
so that both meet the same load of the machine. Every contender's answer is first compared with
eager's. A contender that cannot run is a row with its reason. Tensors are small, because the
device's work is not measured.
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

__all__ = ["OverheadRow", "main", "measure"]

Call: TypeAlias = Callable[[], Any]
CallAndResult: TypeAlias = tuple[Call, torch.Tensor]  # a call and what it should yield
# name, how to make it; a group takes turns
Group: TypeAlias = list[tuple[str, Callable[[], CallAndResult]]]
_WARM_CALLS = 200
_CALLS_PER_BATCH = (
    10  # calls between two waits for the device: so few that none waits for a place in its queue
)
_CHAIN_LAUNCHES = (1, 2, 4, 8)  # launches in a Program; the slope is what a further one costs


@dataclass(frozen=True)
class OverheadRow:
    """One contender: median, 10th and 90th percentile of host microseconds, or the reason why there
    are none.
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


class ThreeOperators(nn.Module):
    """Three operators: relu(b + x @ w.T)."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(wide, wide)), nn.Parameter(torch.randn(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.addmm(self.b, x, self.w.t()))


def measure(
    calls: Sequence[Call], count: int, wait: Call, batch: int = _CALLS_PER_BATCH
) -> list[tuple[float, float, float]]:
    """Microseconds (median, 10th, 90th percentile) of `count` calls of each, in turns of `batch`
    calls that begin on an idle device.
    """
    for call in calls:
        for _ in range(_WARM_CALLS):
            call()
    wait()
    samples: list[list[int]] = [[] for _ in calls]
    clock: list[int] = []
    while len(samples[-1]) < count:
        for call, durations_ns in zip(calls, samples, strict=True):
            for _ in range(min(batch, count - len(durations_ns))):
                begin = time.perf_counter_ns()
                result = call()
                end = time.perf_counter_ns()
                del result
                durations_ns.append(end - begin)
                clock.append(-(end - time.perf_counter_ns()))
            wait()
    clock_ns = statistics.median(clock)
    return [_percentiles(durations_ns, clock_ns) for durations_ns in samples]


def _percentiles(samples: Sequence[int], clock_ns: float) -> tuple[float, float, float]:
    cuts = statistics.quantiles(samples, n=10)
    median, p10, p90 = (
        max(0.0, ns - clock_ns) / 1e3 for ns in (statistics.median(samples), cuts[0], cuts[-1])
    )
    return median, p10, p90


def list_contenders(device: torch.device) -> Iterator[Group]:
    """Groups of contenders; each contender is made when it is measured, so that a failure costs one
    row.
    """
    x = torch.randn(4096, device=device)
    yield [("eager: function, relu", lambda: (lambda: torch.relu(x), torch.relu(x)))]
    yield [("eager: nn.Module, relu", lambda: _make_module_call(Relu(), x))]
    yield [
        ("eager: nn.Module, three operators", lambda: _make_three_operators(device, "")),
        ("accelerated: three operators", lambda: _make_three_operators(device, "eager")),
        (
            "accelerated: three operators, Python executor",
            lambda: _make_three_operators(device, "python"),
        ),
    ]
    yield [("torch.compile: relu", lambda: _make_module_call(torch.compile(Relu()), x))]
    if device.type == "cuda":
        yield from _list_small_on_gpu(x)
        yield from _list_bert_on_gpu(device)


def _list_small_on_gpu(x: torch.Tensor) -> Iterator[Group]:
    yield [
        (
            "torch.compile: relu, reduce-overhead",
            lambda: _make_module_call(torch.compile(Relu(), mode="reduce-overhead"), x),
        )
    ]
    yield [("Triton: launch, relu", lambda: _make_triton_call(x, allocate=False))]
    yield [("Triton: empty_like and launch, relu", lambda: _make_triton_call(x, allocate=True))]
    for launches in _CHAIN_LAUNCHES:
        yield [
            (
                f"accelerated: launches, {launches}",
                lambda launches=launches: _make_launches(x, launches),
            )
        ]  # type: ignore[misc]
    yield [
        (
            "accelerated: launches, 1, result held",
            lambda: _make_holding_call(_make_launches(x, 1), 1),
        )
    ]
    yield [("executor alone: launches, 1", lambda: _make_executor_call(x))]
    yield [("CUDA graph: replay, relu", lambda: _make_replay(Relu(), x))]


def _list_bert_on_gpu(device: torch.device) -> Iterator[Group]:
    bert, (tokens,) = models.bert_base_b1(device=str(device))

    def capture() -> CallAndResult:
        return _make_module_call(bound.bind_module(bert, (tokens,), "eager+graph"), tokens, bert)

    yield [("CUDA graph: replay, BERT-base b1", lambda: _make_replay(bert, tokens))]
    yield [("accelerated: BERT-base b1, CUDA graph", capture)]
    # Two places in turns, which both are known; and five, of which each is an update of the graph.
    yield [
        (
            "accelerated: BERT-base b1, CUDA graph, result held",
            lambda: _make_holding_call(capture(), 1),
        )
    ]
    yield [
        (
            "accelerated: BERT-base b1, CUDA graph, four results held",
            lambda: _make_holding_call(capture(), 4),
        )
    ]
    yield [
        (
            "accelerated: BERT-base b1, step by step",
            lambda: _make_module_call(bound.bind_module(bert, (tokens,), "eager"), tokens, bert),
        )
    ]
    yield [("eager: BERT-base b1", lambda: _make_eager_call(bert, tokens))]
    yield [
        ("torch.compile: BERT-base b1, reduce-overhead", lambda: _make_compiled_bert(bert, tokens))
    ]


def _make_module_call(
    module: Any, x: torch.Tensor, unwrapped: nn.Module | None = None
) -> CallAndResult:
    eager_module = unwrapped or getattr(module, "_orig_mod", module)
    return lambda: module(x), eager_module._call_impl(x)


def _make_holding_call(contender: CallAndResult, results: int) -> CallAndResult:
    """The same call by a caller that still holds the last `results` results: each new one needs
    memory of its own.
    """
    call, expected = contender
    held_results: deque[Any] = deque(maxlen=results)

    def call_and_hold() -> Any:
        held_results.append(call())
        return held_results[-1]

    return call_and_hold, expected


def _make_eager_call(module: nn.Module, x: torch.Tensor) -> CallAndResult:
    module._compiled_call_impl = None
    return _make_module_call(module, x)


def _make_compiled_bert(bert: nn.Module, tokens: torch.Tensor) -> CallAndResult:
    bert._compiled_call_impl = None
    return _make_module_call(torch.compile(bert, mode="reduce-overhead"), tokens)


def _make_three_operators(device: torch.device, schedule: str) -> CallAndResult:
    module, x = ThreeOperators(8).to(device), torch.randn(3, 8, device=device)
    return _make_module_call(bound.bind_module(module, (x,), schedule) if schedule else module, x)


def _make_launches(x: torch.Tensor, launches: int) -> CallAndResult:
    runner = prepare(bound.make_chain(x, launches), x.device)
    return _make_module_call(bound.bind_to(Relu(), (x,), runner, (0,)), x)


def _make_executor_call(x: torch.Tensor) -> CallAndResult:
    runner, inputs = prepare(bound.make_chain(x, 1), x.device), [x]
    return lambda: runner(inputs)[0], torch.relu(x)


def _make_triton_call(x: torch.Tensor, *, allocate: bool) -> CallAndResult:
    kernel, out, grid = (
        bound.compile_relu(x.device)[2],
        torch.empty_like(x),
        (-(-x.numel() // 1024),),
    )

    def call() -> torch.Tensor:
        result = torch.empty_like(x) if allocate else out
        kernel[grid](x, result, x.numel(), BLOCK=1024)
        return result

    return call, torch.relu(x)


def _make_replay(module: nn.Module, x: torch.Tensor) -> CallAndResult:
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


def measure_group(group: Group, calls: int, wait: Call) -> list[OverheadRow]:
    """The rows of a group. A contender that cannot be made is a row with its reason, and the others
    are measured without it.
    """
    rows: dict[str, OverheadRow] = {}
    ready: dict[str, Call] = {}
    for name, make in group:
        try:
            call, expected = make()
            call()
            # the same thing; accuracy is judged elsewhere
            torch.testing.assert_close(call(), expected, rtol=1e-2, atol=1e-3)
            ready[name] = call
        except Exception as error:  # noqa: BLE001  a contender that fails is a row
            rows[name] = _make_failed_row(name, error)
    try:
        batch = 1 if any("BERT" in name for name in ready) else _CALLS_PER_BATCH
        times = measure(tuple(ready.values()), calls, wait, batch) if ready else []
        rows |= {name: OverheadRow(name, *us) for name, us in zip(ready, times, strict=True)}
    except Exception as error:  # noqa: BLE001  as above
        rows |= {name: _make_failed_row(name, error) for name in ready}
    return [rows[name] for name, _ in group]


def _make_failed_row(name: str, error: Exception) -> OverheadRow:
    return OverheadRow(name, reason=f"{type(error).__name__}: {error}".splitlines()[0])


def summarise_rows(rows: Sequence[OverheadRow]) -> dict[str, float]:
    """What the rows say about the package's own cost: microseconds for each further launch, and
    ratios of host times.
    """
    us = {row.name: row.median_us for row in rows if row.median_us is not None}
    quiet = {row.name: row.p10_us for row in rows if row.p10_us is not None}
    summary: dict[str, float] = {}
    first, last = (
        us.get(f"accelerated: launches, {count}")
        for count in (_CHAIN_LAUNCHES[0], _CHAIN_LAUNCHES[-1])
    )
    if first is not None and last is not None:
        summary["further_launch_us"] = (last - first) / (_CHAIN_LAUNCHES[-1] - _CHAIN_LAUNCHES[0])
    bert, replay = "accelerated: BERT-base b1, CUDA graph", "CUDA graph: replay, BERT-base b1"
    accelerated, eager = "accelerated: three operators", "eager: nn.Module, three operators"
    ratios = {
        "bert_over_bare_replay": (us, bert, replay),
        "bert_held_over_bare_replay": (us, f"{bert}, result held", replay),
        "three_operators_over_eager": (us, accelerated, eager),
        "three_operators_over_eager_p10": (quiet, accelerated, eager),
    }
    summary |= {
        name: times[numerator] / times[denominator]
        for name, (times, numerator, denominator) in ratios.items()
        if numerator in times and denominator in times
    }
    return summary


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
    options, summary = {"device": device.type, "calls": args.calls}, {}
    with torch.inference_mode():
        for group in list_contenders(device):
            for row in measure_group(
                [contender for contender in group if args.only in contender[0]], args.calls, wait
            ):
                rows.append(row)
                us = "-" if row.median_us is None else f"{row.median_us:.2f} us"
                print(f"{row.name:58} {us:>12}  {row.reason}", flush=True)
            summary = summarise_rows(rows)
            document = report.make_document(
                "overhead",
                options,
                [asdict(row) for row in rows],
                environment=environment,
                summary=summary,
            )
            # after each group: a run that is cut off keeps what it has
            report.save(args.out, document)
    print(json.dumps({"out": args.out.name, "summary": summary}))
    return 0 if all(not row.reason for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
