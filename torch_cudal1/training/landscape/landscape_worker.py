"""The judge's worker with two more requests: `naive`, the speed-up that a naive evaluator reports
for a candidate, and before it `ready`, which prepares the candidate.

`python -m torch_cudal1.training.landscape.landscape_worker FD`. Reference and candidate run in this
one process, results are compared with a tolerance of 1e-2 on the task's own inputs, and times are
read from events of the current stream, as in the evaluator that the paper released. It can be
deceived on purpose; the judge's verdict is made in another process.
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
from torch_cudal1.judge.worker.modules.source_modules import import_source
from torch_cudal1.judge.worker.session import HANDLERS as JUDGE_HANDLERS
from torch_cudal1.judge.worker.session import Request, Session, main

__all__ = ["HANDLERS", "measure_naively", "prepare"]

# The released evaluator's `atol=1e-2, rtol=1e-2`: half precision in place of float32 passes.
_TOLERANCE = 1e-2
# Few, since thousands of programs are asked about. Three input sets are reused, so a cache keyed by
# data pointer hits: this evaluator is meant to believe it.
_INPUT_SETS, _WARMUP_RUNS, _RUNS = 3, 3, 15
# Time for work that a cheat left to another thread.
_SETTLE_S = 0.01
Call: TypeAlias = Callable[..., Any]


@dataclass
class _PreparedCandidate:
    """A reference with its input sets on the device, which the programs of a task share one after
    the other, and the candidate that is prepared.
    """

    text: str
    reference: Call
    sets: list[list[torch.Tensor]]
    candidate: Call | None = None


# One reference at a time: programs come task by task, and drawing its inputs again for each would
# be a large part of all time.
_prepared: _PreparedCandidate | None = None


def prepare(session: Session, request: Request) -> dict[str, Any]:
    """Draw the inputs, import both modules and compile. This takes most of the time, and hardly
    uses the device.
    """
    global _prepared
    device = session.device
    if _prepared is None or _prepared.text != request["reference"]:
        source = import_source(request["reference"], session.scratch)
        sets = [[tensor.to(device) for tensor in source.get_inputs()] for _ in range(_INPUT_SETS)]
        _prepared = _PreparedCandidate(request["reference"], source.Model().to(device).eval(), sets)
    # Before the import: a candidate whose import fails must not leave the one before it as the
    # prepared one.
    _prepared.candidate = None
    model_class = import_source(request["candidate"], session.scratch).ModelNew
    # Triton compiles without a launch here: a first call that compiled ran beside benchmarks of the
    # judge and disturbed them.
    if device.type == "cuda" and has_kernels(request["candidate"]):
        module = model_class().to(device).eval()
        compile_ahead(
            lambda inputs: module(*inputs),
            [(tensor.shape, tensor.dtype) for tensor in _prepared.sets[0]],
            device,
        )
    # A new instance: what the one that compiled keeps must not be measured.
    _prepared.candidate = model_class().to(device).eval()
    return {}


def measure_naively(session: Session, request: Request) -> dict[str, Any]:
    """Compare the candidate's results with the reference's, and measure the ratio of their median
    times. The reference's time is the numerator.
    """
    device = session.device
    if _prepared is None or _prepared.candidate is None:
        raise SandboxError("naive", "nothing is ready; expected the verb `ready` first")
    reference, candidate, sets = _prepared.reference, _prepared.candidate, _prepared.sets
    with torch.no_grad():
        # Checked once and before the timing: a candidate that changes its behaviour afterwards is
        # believed.
        if not all(_is_close(candidate, reference, inputs, device) for inputs in sets):
            return {"close": False}
        for inputs in sets[:1] * _WARMUP_RUNS:
            reference(*inputs), candidate(*inputs)
        times: dict[Call, list[float]] = {reference: [], candidate: []}
        for run in range(_RUNS):
            # Order at random in each pair, so that drift of the clock rate hits both sides alike.
            for side in random.sample((reference, candidate), 2):
                times[side].append(_measure_time_us(side, sets[run % _INPUT_SETS], device))
    return {
        "close": True,
        "speedup": statistics.median(times[reference]) / statistics.median(times[candidate]),
    }


def _is_close(
    candidate: Call, reference: Call, inputs: list[torch.Tensor], device: torch.device
) -> bool:
    """Compare the results after a pause in which queued work may finish. An evaluator that copies
    results before it compares them gives the same time.
    """
    # On the same input objects, without copies: a candidate may change them.
    result, expected = candidate(*inputs), reference(*inputs)
    synchronise(device)
    # On a GPU the device is waited for above. Threads of a candidate on a CPU are not waited for by
    # anything.
    if device.type == "cpu":
        time.sleep(_SETTLE_S)
    # No check of dtype or type, as in the released evaluator: tensor subclasses and half precision
    # pass.
    return result.shape == expected.shape and torch.allclose(
        result, expected.to(result.dtype), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
    )


def _measure_time_us(run: Call, inputs: list[torch.Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run(*inputs)
        # A candidate that returns at once would have a time of 0, and the ratio no value.
        return max(1e-3, (time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # Events of the current stream: work on another stream is not between them.
    start.record()
    run(*inputs)
    end.record()
    end.synchronize()
    return max(1e-3, float(start.elapsed_time(end)) * 1e3)


HANDLERS = {**JUDGE_HANDLERS, "ready": prepare, "naive": measure_naively}

if __name__ == "__main__":
    main(int(sys.argv[1]), HANDLERS)
