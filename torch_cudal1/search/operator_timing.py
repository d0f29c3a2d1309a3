"""Which of several Programs that compute the same is the fastest, measured on random operands in
the user's own process: PyTorch's operators, one in place of another, whose speed no rule tells.

A form takes the place of the model's own only if it computes the same on every trial, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.graph.swap import FAILURES
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.records import Candidate, Region
from torch_cudal1.ir.schedule import Schedule
from torch_cudal1.runtime.cuda_graph import capture_calls
from torch_cudal1.runtime.executor import prepare

__all__ = ["MIN_SPEEDUP", "OperatorChoice", "draw_operands", "find_fastest_form"]

# Of the model's own form over another one, below which its own stays.
MIN_SPEEDUP = 1.05
# Calls in one CUDA graph, and replays of it: a call alone takes less than a launch.
CALLS, REPLAYS = 10, 7
# Units in the last place of the format by which two forms may differ, root mean square.
MAX_UNITS = 4


@dataclass(frozen=True)
class OperatorChoice:
    """`program` with the fastest operators, and for each kind of them what took PyTorch's place."""

    program: Program
    techniques: tuple[str, ...] = ()

    def make_baseline(self, region: Region, schedule: Schedule) -> Candidate:
        """The baseline of `region` under `schedule` with these operators. They were timed in CUDA
        graphs: launched one by one from Python their steps cost more than one operator.
        """
        if not (schedule.compiles or schedule.cuda_graph):
            return Candidate(region.program, schedule, "baseline")
        return Candidate(self.program, schedule, "baseline", self.techniques)


def draw_operands(specs: Sequence[TensorSpec], device: torch.device) -> list[torch.Tensor]:
    """Normal random numbers in the layouts of `specs`, which may have expanded dimensions; the same
    each time.
    """
    generator = torch.Generator(device).manual_seed(0)
    return [_draw(spec, device, generator) for spec in specs]


def _draw(spec: TensorSpec, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True)
    )
    values = torch.randn(extent, device=device, generator=generator, dtype=torch.float32)
    return values.to(spec.torch_dtype).as_strided(spec.shape, spec.strides)


def find_fastest_form(
    forms: Mapping[str, Program], default: str, trials: Sequence[list[torch.Tensor]], stage: str
) -> str:
    """The name of the fastest of `forms`, which are timed on the first of `trials`; `default` where
    nothing else is right on all of them and faster. `stage`: what telemetry calls it.

    Another form that fails costs itself only. Raises what the default form does, and what leaves
    the CUDA context unusable.
    """
    operands = trials[0]
    device = operands[0].device
    default_run = prepare(forms[default], device)
    references = [default_run(inputs)[0] for inputs in trials]
    graphs = {default: _capture(default_run, operands)}
    for name, program in forms.items():
        if name == default:
            continue
        try:
            run = prepare(program, device)
            results = [run(inputs)[0] for inputs in trials]
            if all(map(_is_close, results, references)):
                graphs[name] = _capture(run, operands)
        except FAILURES as error:
            if is_sticky(error):
                raise
            telemetry.record("judge", stage, failed=f"{name}: {error}"[:200])
    medians_us = _time_graphs(graphs)
    fastest = min(medians_us, key=medians_us.__getitem__)
    fastest = fastest if medians_us[default] >= MIN_SPEEDUP * medians_us[fastest] else default
    shapes = [tuple(operand.shape) for operand in operands]
    telemetry.record("judge", stage, shapes=shapes, runs=fastest, medians_us=dict(medians_us))
    return fastest


def _is_close(result: Any, reference: Any) -> bool:
    """Whether both have NaN at the same places and differ by a few units in the last place
    elsewhere.
    """
    if not torch.equal(result.isnan(), reference.isnan()):
        return False
    numbers = reference.nan_to_num(0.0).double()
    error = (result.nan_to_num(0.0).double() - numbers).norm()
    return bool(error <= MAX_UNITS * torch.finfo(reference.dtype).eps * numbers.norm())


def _capture(run: Runner, operands: list[torch.Tensor]) -> Callable[[], object]:
    def call_often() -> None:
        for _ in range(CALLS):
            run(operands)

    # Once before: libraries make their plans at the first call, which cannot be captured.
    run(operands)
    device = operands[0].device
    torch.cuda.synchronize(device)
    return capture_calls(call_often, device)


def _time_graphs(graphs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of one call of each, medians of replays in turns."""
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for replay in graphs.values():
        replay()
    for _ in range(REPLAYS):
        for name, replay in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            samples[name].append(1e3 * begin.elapsed_time(end) / CALLS)
    return {name: median(times) for name, times in samples.items()}
