"""The process of one column of one model: builds it, prepares it, then samples its time on demand.

It answers on its standard output with one JSON object a line: first how the preparation went, then
what a line on its standard input asks for. `sample SECONDS`: the microseconds of calls; `profile`:
the GPU's kernels of a call; `floor`: what the own forward has to do, and the least time for it. Any
other line ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.real_models.columns import COLUMNS, describe_runs
from benchmarks.real_models.floors import count_model_work, find_floor_us, measure_rates
from benchmarks.real_models.kernel_shares import list_kernel_shares
from benchmarks.real_models.zoo import build_model
from torch_cudal1.core import telemetry
from torch_cudal1.judge.benchmark.clock import synchronise

__all__ = [
    "PreparedColumn",
    "describe_floor",
    "list_search_steps",
    "main",
    "profile_column",
    "relative_difference",
    "sample_calls",
]

# Calls after the first, until everything that compiles or captures later has done so.
WARM_CALLS = 6
# Of the telemetry of a search, and of each event's facts.
_SEARCH_STEPS = ("baselines", "heat", "accepted", "rejected", "seconds", "blocks", "end_to_end")
_STEP_FACTS = ("best", "label", "speedup", "low", "reason", "medians_us", "baselines", "candidates")
MIN_SAMPLES = 5


@dataclass(frozen=True)
class PreparedColumn:
    """`call` makes one call; `put_back`, off the clock, undoes what it changed in a cache's position.
    `module`: the own one, with its arguments.
    """

    call: Callable[[], Any]
    put_back: Callable[[], None]
    module: nn.Module
    positional: Sequence[Any]
    named: Mapping[str, Any]


def main() -> None:
    """Prepare the column, then serve samples."""
    args = _parse_arguments()
    # Libraries print to standard output; the answers must stay alone there.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    device = torch.device(args.device)
    try:
        column, facts = _prepare(args, device)
    except Exception as error:  # noqa: BLE001  a column that fails is a row with its reason
        _answer(answers, {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        return
    _answer(answers, facts)
    for line in sys.stdin:
        word, _, seconds = line.strip().partition(" ")
        if word == "sample":
            _answer(answers, {"us": sample_calls(column, device, float(seconds))})
        elif word == "profile":
            _answer(answers, profile_column(column, device))
        elif word == "floor":
            _answer(answers, describe_floor(column, device))
        else:
            return


def _prepare(
    args: argparse.Namespace, device: torch.device
) -> tuple[PreparedColumn, dict[str, Any]]:
    torch.set_grad_enabled(False)
    _import_all()
    module, positional, named = build_model(args.model, args.size, args.precision, device)
    put_back = _remember_positions(named)
    expected = [tensor.clone() for tensor in _outputs_of(module(*positional, **named))]
    put_back()
    synchronise(device)
    begin = time.perf_counter()
    target = COLUMNS[args.column].prepare(module, positional, named, args.cache_dir)
    result = target(*positional, **named)
    synchronise(device)
    first_call_s = time.perf_counter() - begin
    difference = relative_difference(_outputs_of(result), expected)
    del result
    for _ in range(WARM_CALLS):
        put_back()
        target(*positional, **named)
    put_back()
    later = relative_difference(_outputs_of(target(*positional, **named)), expected)
    facts = {
        "first_call_s": first_call_s,
        "ready_s": time.perf_counter() - begin,
        "difference": max(difference, later),
        "runs": describe_runs(target),
    }
    if COLUMNS[args.column].tuned:
        facts["search"] = list_search_steps(telemetry.report().events)
    column = PreparedColumn(
        lambda: target(*positional, **named), put_back, module, positional, named
    )
    return column, facts


def list_search_steps(events: Sequence[telemetry.Event]) -> list[dict[str, Any]]:
    """What a search did, in order: each with the seconds since the first of them, so that a result
    says why it has no kernel.
    """
    steps = [event for event in events if event.what in _SEARCH_STEPS]
    return [
        {
            "s": round(event.at - steps[0].at, 1),
            "what": event.what,
            **{name: event.facts[name] for name in _STEP_FACTS if event.facts.get(name)},
        }
        for event in steps
    ]


def _import_all() -> None:
    """What any column imports, off the clock and in every process alike."""
    import torch._dynamo
    import torch._inductor.compile_fx

    import cudal1

    # Its modules are imported at first use. Switched off, or it would hash Inductor's files off the clock.
    cudal1.accelerate(torch.nn.Identity(), enabled=False)


def _remember_positions(named: dict[str, Any]) -> Callable[[], None]:
    """What puts the positions of a cache among the arguments back: each call of a decoder moves them,
    and after enough calls they would lie outside.
    """
    layers = [layer for value in named.values() for layer in getattr(value, "layers", ())]
    positions = [
        item
        for layer in layers
        for item in vars(layer).values()
        if isinstance(item, torch.Tensor) and not item.is_floating_point()
    ]
    saved = [position.clone() for position in positions]

    def put_back() -> None:
        if positions:
            torch._foreach_copy_(positions, saved)

    return put_back


def sample_calls(column: PreparedColumn, device: torch.device, seconds: float) -> list[float]:
    """Microseconds of single calls, each from an idle device to a finished result."""
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or time.perf_counter() < end:
        column.put_back()
        synchronise(device)
        begin = time.perf_counter()
        column.call()
        synchronise(device)
        samples.append(1e6 * (time.perf_counter() - begin))
    return samples


def profile_column(column: PreparedColumn, device: torch.device) -> dict[str, Any]:
    """The GPU's kernels of its calls, see `list_kernel_shares`."""

    def call() -> None:
        column.put_back()
        column.call()

    return {"profile": list_kernel_shares(call, device)}


def describe_floor(column: PreparedColumn, device: torch.device) -> dict[str, Any]:
    """The work of the own forward, the device's rates in its dtype, and the floor in microseconds."""
    work = count_model_work(column.module, column.positional, column.named)
    column.put_back()
    dtype = next((p.dtype for p in column.module.parameters()), torch.float32)
    rates = measure_rates(device, dtype)
    return {"floor": {"us": find_floor_us(work, rates), **asdict(work), **asdict(rates)}}


def relative_difference(outputs: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative root mean square difference of two lists of tensors; infinity where they
    differ in number or shape.
    """
    if [tensor.shape for tensor in outputs] != [tensor.shape for tensor in expected]:
        return float("inf")
    differences = [0.0]
    for output, reference in zip(outputs, expected, strict=True):
        error, size = (output.double() - reference.double()).norm(), reference.double().norm()
        differences.append(float(error / size) if size else float(error))
    return max(differences)


def _outputs_of(result: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a model's result; a cache that it hands back is not looked at."""
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if hasattr(result, "values") else result
    return [item for item in values if isinstance(item, torch.Tensor) and item.is_floating_point()]


def _answer(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "column", "size", "precision", "device"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--cache-dir", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
