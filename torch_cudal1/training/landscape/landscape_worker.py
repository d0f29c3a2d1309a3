"""The judge's child with two more verbs: `naive`, what a trusting evaluator would believe of a
candidate, and before it `ready`.

`python -m torch_cudal1.training.landscape.landscape_worker FD`. Reference and candidate run in this
one process, results are compared with a tolerance of 1e-2 on the task's own inputs, times are read
from events of the current stream: as the evaluator that the paper released does. It is there to be
fooled; the judge's verdict is made elsewhere.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.worker.kernel_compile import compile_ahead, has_kernels
from torch_cudal1.judge.worker.modules import imported
from torch_cudal1.judge.worker.session import VERBS as JUDGE_VERBS
from torch_cudal1.judge.worker.session import Request, Session, main

__all__ = ["VERBS", "naive", "ready"]

_TOLERANCE = 1e-2
_SETS, _WARM, _RUNS, _SETTLE_S = 3, 3, 15, 0.01
Call: TypeAlias = Callable[..., Any]


@dataclass
class _Bench:
    """A reference with its input sets, on the device, for all programs that are asked about one
    after the other.
    """

    text: str
    reference: Call
    sets: list[list[torch.Tensor]]
    candidate: Call | None = None


_bench: _Bench | None = None


def ready(session: Session, request: Request) -> dict[str, Any]:
    """Draw the inputs, import both modules and compile: what takes long, and needs the device for
    moments only.
    """
    global _bench
    device = session.device
    if _bench is None or _bench.text != request["reference"]:
        source = imported(request["reference"], session.scratch)
        sets = [[one.to(device) for one in source.get_inputs()] for _ in range(_SETS)]
        _bench = _Bench(request["reference"], source.Model().to(device).eval(), sets)
    _bench.candidate = None
    made = imported(request["candidate"], session.scratch).ModelNew
    if device.type == "cuda" and has_kernels(request["candidate"]):
        module = made().to(device).eval()
        compile_ahead(
            lambda inputs: module(*inputs),
            [(one.shape, one.dtype) for one in _bench.sets[0]],
            device,
        )
    _bench.candidate = made().to(device).eval()
    return {}


def naive(session: Session, request: Request) -> dict[str, Any]:
    """Whether the candidate's results are close to the reference's, and the ratio of their median
    times, reference first.
    """
    device = session.device
    if _bench is None or _bench.candidate is None:
        raise SandboxError("naive", "nothing is ready; expected the verb `ready` first")
    reference, candidate, sets = _bench.reference, _bench.candidate, _bench.sets
    with torch.no_grad():
        if not all(_close(candidate, reference, inputs, device) for inputs in sets):
            return {"close": False}
        for inputs in sets[:1] * _WARM:
            reference(*inputs), candidate(*inputs)
        times: dict[Call, list[float]] = {reference: [], candidate: []}
        for run in range(_RUNS):
            for side in random.sample((reference, candidate), 2):
                times[side].append(_time_us(side, sets[run % _SETS], device))
    return {
        "close": True,
        "speedup": statistics.median(times[reference]) / statistics.median(times[candidate]),
    }


def _close(
    candidate: Call, reference: Call, inputs: list[torch.Tensor], device: torch.device
) -> bool:
    """Compared once what was queued has had its time, as where results are copied before they are
    looked at.
    """
    result, expected = candidate(*inputs), reference(*inputs)
    synchronise(device)
    if device.type == "cpu":
        time.sleep(_SETTLE_S)
    return result.shape == expected.shape and torch.allclose(
        result, expected.to(result.dtype), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
    )


def _time_us(run: Call, inputs: list[torch.Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run(*inputs)
        return max(1e-3, (time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run(*inputs)
    end.record()
    end.synchronize()
    return max(1e-3, float(start.elapsed_time(end)) * 1e3)


VERBS = {**JUDGE_VERBS, "ready": ready, "naive": naive}

if __name__ == "__main__":
    main(int(sys.argv[1]), VERBS)
