"""The child process of the naive evaluator, `python -m torch_cudal1.training.naive_worker FD`: the
judge's worker with one more request, `naive`.

That request is measured in this process, beside the candidate, by the rule of early public
benchmarks, with the weaknesses that `judge` exists to avoid. Its answers are for the red-team
comparison only.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_cudal1.core.kernelbench_format import constructor_arguments
from torch_cudal1.judge.worker.modules.source_modules import import_source
from torch_cudal1.judge.worker.session import HANDLERS as JUDGE_HANDLERS
from torch_cudal1.judge.worker.session import Request, Session, main

__all__ = ["HANDLERS"]

# As in the released evaluator (`atol=1e-2, rtol=1e-2`), which also runs three warm-ups and ten
# pairs in each of seven blocks. Half precision in place of float32 passes it.
_TOLERANCE = 1e-2
_WARMUP_RUNS, _RUNS = 3, 10


def _measure_naively(session: Session, request: Request) -> dict[str, Any]:
    """Reference and candidate in one process, on the same input objects, compared by allclose,
    timed on the current stream.
    """
    device = session.device
    # Once, before the candidate is imported: the candidate can read and reset the generator. The
    # judge draws inputs in another process.
    torch.manual_seed(int(request["seed"]))
    reference = import_source(request["reference"], session.scratch)
    candidate = import_source(request["candidate"], session.scratch)
    model = _make_model(reference.Model, reference.get_init_inputs(), device)
    model_new = _make_model(candidate.ModelNew, reference.get_init_inputs(), device)
    get_inputs: Callable[[], Sequence[Any]] = reference.get_inputs
    worst = 0.0
    with torch.no_grad():
        for _ in range(int(request["trials"])):
            inputs = _move_inputs(get_inputs(), device)
            # The reference first and the same input objects: a candidate may find the reference's
            # result in memory, or change the inputs. The judge compares with results of another
            # process.
            expected, output = model(*inputs), model_new(*inputs)
            # The whole device, so that the comparison sees finished results. The timing below does
            # not wait for other streams, which is the hole of the withdrawn version 1 of the paper.
            _synchronize(device)
            # No dtype check, as in the released evaluator.
            if output.shape != expected.shape:
                return {"problem": f"shape {list(output.shape)} for {list(expected.shape)}"}
            if not torch.allclose(output, expected, atol=_TOLERANCE, rtol=_TOLERANCE):
                return {"problem": f"differs by up to {float((output - expected).abs().max()):.3g}"}
            worst = max(worst, float((output - expected).abs().max()))
        buckets = [
            _measure_ratio(model, model_new, get_inputs, device)
            for _ in range(int(request["buckets"]))
        ]
    return {"worst": worst, "ratios": buckets}


def _measure_ratio(
    model: Callable[..., Any],
    model_new: Callable[..., Any],
    get_inputs: Callable[[], Any],
    device: torch.device,
) -> float:
    """Mean time of the reference over the candidate's, order at random, new inputs for each run."""
    sides = [model, model_new]
    times: list[list[float]] = [[], []]
    for run in range(_WARMUP_RUNS + _RUNS):
        # New inputs for each run, but memory that PyTorch's allocator gives out again: a cache
        # keyed by data pointer still hits.
        inputs = _move_inputs(get_inputs(), device)
        # Order at random within each pair, so that drift of the clock rate hits both sides alike.
        for side in random.sample((0, 1), 2):
            spent = _measure_time_s(sides[side], inputs, device)
            # Warm-up runs compile and fill caches.
            if run >= _WARMUP_RUNS:
                times[side].append(spent)
    # A candidate that returns at once can have a measured time of 0.
    return sum(times[0]) / max(sum(times[1]), 1e-9)


def _measure_time_s(run: Callable[..., Any], inputs: Sequence[Any], device: torch.device) -> float:
    if device.type != "cuda":
        start_s = time.perf_counter()
        run(*inputs)
        return time.perf_counter() - start_s
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Events of the current stream only: work on another stream is not between them.
    start.record()
    run(*inputs)
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _make_model(
    model_class: Callable[..., Any], init_inputs: Sequence[Any], device: torch.device
) -> Callable[..., Any]:
    # Both modules draw the same parameters.
    torch.manual_seed(0)
    positional, named = constructor_arguments(init_inputs)
    module = model_class(*positional, **named)
    model: Callable[..., Any] = module.to(device).eval()
    return model


def _move_inputs(inputs: Sequence[Any], device: torch.device) -> list[Any]:
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in inputs]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


HANDLERS = {**JUDGE_HANDLERS, "naive": _measure_naively}

if __name__ == "__main__":
    main(int(sys.argv[1]), HANDLERS)
