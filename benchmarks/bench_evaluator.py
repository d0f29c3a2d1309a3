"""How many new programs a second the training evaluator judges in the `train` profile, and which
steps take the time.

Programs are Triton kernels (plain PyTorch on a CPU) for two tasks, all different, a quarter of them
wrong; none is measured twice. A run is a number of lanes (programs judged side by side) and a
trust: "foreign" is a process for each program, as for a language model's programs; "own" uses
processes again, as for programs that templates render. The rate counts from the end of the second
batch, when all processes are up: each lane starts its process during the first batch and its spare
one during the second. Lanes of trust "own" share the GPU through an MPS server where the machine
has one, unless --no-mps is given. A run in whose first batch no program is right ends the
benchmark: its figures would mean nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain, count, islice, product
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import contract_for
from torch_cudal1.judge.pool.judge_evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.slots import count_fitting_slots
from torch_cudal1.judge.sandbox.limits import Trust

__all__ = ["EvaluatorRun", "generate_programs", "main", "run_batches"]

_GOAL_PER_S = 10.0  # new programs a second, on one H200
_WARM_UP_BATCHES = 2  # batches in which processes start
_REFERENCE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return {result}


def get_inputs():
    return [torch.randn({rows}, {width})]


def get_init_inputs():
    return []
"""
_CHAIN, _SOFTMAX = "torch.relu(x) * 2 + 1", "torch.softmax(x, dim=-1)"
_TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, width, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < width
    value = tl.load(x + row * width + columns, mask=mask, other={other})
    {body}
    tl.store(y + row * width + columns, result, mask=mask)


class ModelNew(torch.nn.Module):
    def forward(self, given):
        x = given.contiguous()
        y = torch.empty_like(x)
        block = max({block}, triton.next_power_of_2(x.shape[1]))
        kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=block, num_warps={warps}, num_stages={stages})  # {number}
        return {returned}
"""
_RETURNED = {  # eager's strides: of a chain the input's, of a softmax rows one after another
    _CHAIN: "y if given is x else torch.empty_like(given).copy_(y)",
    _SOFTMAX: "y",
}
_BODIES = {
    _CHAIN: (
        "result = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL) * 2.0 + 1.0",
        "result = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL) * 2.0 + 1.001",
        "0.0",
    ),
    _SOFTMAX: (
        "e = tl.exp(value - tl.max(value, 0)); result = e / tl.sum(e, 0)",
        "e = tl.exp(value); result = e / (tl.sum(e, 0) + 1.0)",
        "-float('inf')",
    ),
}
_PLAIN = """import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return {result}  # {number}
"""
_PLAINS = {
    _CHAIN: ("torch.relu(x).mul_(2).add_(1)", "torch.relu(x) * 2"),
    _SOFTMAX: ("x.softmax(-1)", "torch.exp(x)"),
}


@dataclass(frozen=True)
class EvaluatorRun:
    """One line of the results. `rate`: new programs a second; `seconds`: of each step, over all
    lanes, a program; `batches`: how many programs each had, and when it was done, in seconds since
    the start; `served`: lanes that shared the GPU through a server.
    """

    lanes: int
    trust: Trust
    programs: int
    wall_s: float
    first_batch_s: float
    rate: float
    outcomes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    batches: list[tuple[int, float]] = field(default_factory=list)
    served: int = 0
    # what was reported of the last programs that should have been right
    details: list[str] = field(default_factory=list)


def generate_programs(result: str, device: str, block: int) -> Iterator[Decoded]:
    """An endless stream of different programs for a reference, every fourth one wrong."""
    forms = list(product((block, 2 * block), (2, 4, 8, 16), (1, 2, 3, 4)))
    for number in count():
        wrong = number % 4 == 3
        if device == "cuda":
            right_body, wrong_body, other = _BODIES[result]
            wide, warps, stages = forms[number % len(forms)]
            body = wrong_body if wrong else right_body
            knobs = {"block": wide, "warps": warps, "stages": stages, "number": number}
            text = _TRITON.format(body=body, other=other, returned=_RETURNED[result], **knobs)
        else:
            text = _PLAIN.format(result=_PLAINS[result][wrong], number=number)
        yield Decoded(f"{result} {number}", text)


def run_batches(
    settings: MeasurementSettings, lanes: int, budget_s: float, shape: tuple[int, int]
) -> EvaluatorRun:
    """Measure batches of new programs until the time is spent."""
    tasks = [
        TrainingTask(name, _REFERENCE.format(result=name, rows=shape[0], width=shape[1]))
        for name in _BODIES
    ]
    streams = _start_streams(tasks, settings.device.type, shape[1])
    outcomes, details, batches = Counter[str](), list[str](), list[tuple[int, float]]()
    begin = time.monotonic()
    with JudgeEvaluator(settings, slots=lanes) as evaluator:
        while not batches or time.monotonic() - begin < budget_s:
            # the programs of the first batch wait for processes to start
            programs_per_task = 4 * lanes if batches else -(-lanes // 2)
            batch = [(task, list(islice(streams[task.id], programs_per_task))) for task in tasks]
            try:
                measurements = list(chain.from_iterable(evaluator.measure_all(batch)))
            except Cudal1Error as error:  # what was measured before is worth knowing all the same
                details.append(f"stopped: {error}")
                break
            outcomes.update(measurement.outcome for measurement in measurements)
            details += [
                f"{measurement.outcome}: {measurement.detail}"
                for measurement in measurements
                if _is_meant_right(measurement) and measurement.outcome != "ok"
            ]
            batches.append((len(measurements), round(time.monotonic() - begin, 2)))
            if not _count_right(outcomes):
                break
        wall_s, served = time.monotonic() - begin, evaluator.served
        program_count = sum(programs for programs, _ in batches)
        seconds = {
            name: round(spent / max(1, program_count), 4)
            for name, spent in evaluator.seconds.most_common()
        }
    first_s = batches[0][1] if batches else wall_s
    return EvaluatorRun(
        lanes,
        settings.trust,
        program_count,
        wall_s,
        first_s,
        _compute_rate(batches),
        dict(outcomes),
        seconds,
        batches,
        served,
        details[-8:],
    )


def _start_streams(
    tasks: Sequence[TrainingTask], device: str, width: int
) -> dict[str, Iterator[Decoded]]:
    block = 1 << (width - 1).bit_length()
    return {task.id: generate_programs(task.id, device, block) for task in tasks}


def _compute_rate(batches: Sequence[tuple[int, float]]) -> float:
    """Programs a second, without the batches in which processes start where there are others."""
    warm = batches[: min(_WARM_UP_BATCHES, len(batches) - 1)]
    begin_s = warm[-1][1] if warm else 0.0
    counted = batches[len(warm) :]
    return sum(programs for programs, _ in counted) / (counted[-1][1] - begin_s) if counted else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every run, write after each; 1 if no program was right, or a GPU missed the goal."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    shape = tuple(map(int, options.shape.split(",")))
    tensor_bytes, device = 4 * shape[0] * shape[1], torch.device(options.device)
    counts = dict.fromkeys(
        count_fitting_slots(int(lanes), device, tensor_bytes) for lanes in options.lanes.split(",")
    )
    planned = [(lanes, trust) for lanes in counts for trust in options.trusts.split(",")]
    runs: list[EvaluatorRun] = (
        [EvaluatorRun(**row) for row in report.load(options.out)["rows"]]
        if options.out.exists()
        else []
    )
    missing = [
        lanes_and_trust
        for lanes_and_trust in planned
        if lanes_and_trust not in {(run.lanes, run.trust) for run in runs}
    ]
    settings = Settings()
    for index, (lanes, trust) in enumerate(missing):
        with tempfile.TemporaryDirectory() as folder:
            measurement_settings = MeasurementSettings(
                settings,
                contract_for(settings),
                device,
                Path(folder),
                trust=trust,
                mps=not options.no_mps,
            )
            run = run_batches(
                measurement_settings, lanes, options.budget_s / len(missing), (shape[0], shape[1])
            )
        runs.append(run)
        print(json.dumps(asdict(run)), flush=True)
        report.save(options.out, _make_document(options, runs))
        if not _count_right(run.outcomes):
            print(
                f"run {index + 1}: no program was right, so no rate means anything: {run.details}",
                flush=True,
            )
            return 1
    best = max(run.rate for run in runs)
    print(json.dumps({"out": options.out.name, "best_rate": best, "goal": _GOAL_PER_S}))
    return 0 if best >= _GOAL_PER_S or options.device == "cpu" else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--lanes", default="11,8", help="comma-separated; fewer where the GPU's memory asks for it"
    )
    parser.add_argument("--trusts", default="own,foreign", help="comma-separated")
    parser.add_argument("--budget-s", type=float, default=240.0, help="for all runs together")
    parser.add_argument(
        "--no-mps",
        action="store_true",
        help="every process with a context of its own, which the GPU gives turns",
    )
    parser.add_argument("--shape", default="4096,2048")
    parser.add_argument("--out", type=Path, default=Path("evaluator.json"))
    return parser


def _is_meant_right(measurement: Measured) -> bool:
    return int(measurement.program.rpartition(" ")[2]) % 4 != 3


def _count_right(outcomes: Mapping[str, int]) -> int:
    """How many programs computed what they should, including those that could not be timed on a
    busy machine.
    """
    return outcomes.get("ok", 0) + outcomes.get("unstable", 0)


@cache
def _read_environment() -> dict[str, Any]:
    return report.environment()  # asks other programs: once


def _make_document(options: argparse.Namespace, runs: Sequence[EvaluatorRun]) -> dict[str, Any]:
    shown_options = {name: value for name, value in vars(options).items() if name != "out"}
    rows = [asdict(run) for run in runs]
    return report.make_document(
        "evaluator",
        shown_options,
        rows,
        environment=_read_environment(),
        best_rate=max(run.rate for run in runs),
        goal=_GOAL_PER_S,
    )


if __name__ == "__main__":
    raise SystemExit(main())
