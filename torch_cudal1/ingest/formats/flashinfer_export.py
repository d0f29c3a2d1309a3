"""A region and its stored decision as FlashInfer-Trace records: Definition, Solution and a Trace
with what was measured.

Both Programs become Python of ATen calls. What the format cannot say is a `Refusal` with its
reason: machine code, constants, inputs that are not contiguous, dtypes it has no name for. The
schedule is no part of a source; the description names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.formats.flashinfer import (
    DTYPES,
    Definition,
    FlashInferAxis,
    FlashInferTrace,
    Shape,
    Solution,
    TraceEvaluation,
    Workload,
)
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Entry, Region
from torch_cudal1.ir.value_specs import output_specs

__all__ = ["ExportedEntry", "export_entry", "write_python"]

_SOURCE = "main.py"


@dataclass(frozen=True)
class ExportedEntry:
    """The records of one region."""

    definition: Definition
    solution: Solution
    trace: FlashInferTrace


def export_entry(region: Region, entry: Entry) -> ExportedEntry | Refusal:
    """The records of a region and the entry that the cache holds for it."""
    if entry.choice.origin == "baseline":
        return Refusal(
            f"the fastest is a baseline ({entry.choice.label}): there is no solution to write"
        )
    reference, candidate = write_python(region.program), write_python(entry.choice.program)
    for text in (reference, candidate):
        if isinstance(text, Refusal):
            return text
    # For mypy: the loop above has returned every Refusal.
    assert isinstance(reference, str)
    assert isinstance(candidate, str)
    results = output_specs(region.program)
    outputs = [spec for spec in results if spec is not None]
    if len(outputs) != len(results):
        return Refusal("an output is no tensor")
    if problem := next(filter(None, map(_check_spec, (*region.program.inputs, *outputs))), None):
        return problem
    name = f"cudal1_{region.key[:16]}"
    definition = _definition(name, region, reference, outputs)
    solution = Solution(
        name=f"{name}_{entry.choice.digest[:8]}",
        definition=name,
        author="torch-cudal1",
        language="python",
        target_hardware=(entry.target.sku or entry.target.device,),
        entry_point=f"{_SOURCE}::run",
        sources={_SOURCE: candidate},
        # `run` returns its results, as the Program does.
        into_outputs=False,
        description=f"{entry.choice.label}, measured under schedule {entry.choice.schedule}, contract {entry.contract.precision}",
    )
    workload = Workload({}, {name: {"type": "random"} for name in definition.inputs}, region.key)
    return ExportedEntry(
        definition, solution, FlashInferTrace(name, workload, solution.name, _evaluation(entry))
    )


def write_python(program: Program) -> str | Refusal:
    """A Program of ATen calls as the text of a function `run`."""
    if program.constants:
        return Refusal(
            f"it holds {len(program.constants)} constants, and the format has no place for them"
        )
    lines = []
    for step in program.steps:
        if not isinstance(step, Aten):
            return Refusal("it launches machine code, and the format has no language for that")
        arguments = [_write_argument(arg) for arg in step.args] + [
            f"{name}={_write_argument(arg)}" for name, arg in step.kwargs
        ]
        targets = ", ".join(f"v{out}" for out in step.outs) + (
            # An operator that returns a list of one tensor needs the comma to unpack it.
            "," if step.many and len(step.outs) == 1 else ""
        )
        lines.append(f"    {targets} = torch.ops.{step.target}({', '.join(arguments)})")
    results = [f"v{out}" for out in program.outputs if out is not None]
    head = f"def run({', '.join(f'v{number}' for number in range(len(program.inputs)))}):"
    result = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return "\n".join(["import torch", "", "", head, *lines, f"    return {result}", ""])


def _definition(
    name: str, region: Region, reference: str, outputs: Sequence[TensorSpec]
) -> Definition:
    inputs = region.program.inputs
    sizes = sorted({size for spec in (*inputs, *outputs) for size in spec.shape})
    return Definition(
        name=name,
        op_type="fused",
        # Axes by size: a Program knows no names for its dimensions.
        axes={f"n{size}": FlashInferAxis(size) for size in sizes},
        inputs={
            f"v{number}": _shape(spec, region.roles[number]) for number, spec in enumerate(inputs)
        },
        outputs={f"out{number}": _shape(spec) for number, spec in enumerate(outputs)},
        reference=reference,
        tags=("source:torch-cudal1",),
        description=f"{region.name or 'a region'}, key {region.key}",
    )


def _shape(spec: TensorSpec, description: str | None = None) -> Shape:
    return Shape(tuple(f"n{size}" for size in spec.shape), spec.dtype, description)


def _check_spec(spec: TensorSpec) -> Refusal | None:
    if spec.dtype not in DTYPES:
        return Refusal(f"a tensor is {spec.dtype}, for which the format has no name")
    expected = list(reversed(list(_row_major(reversed(spec.shape)))))
    if any(
        # The stride of a dimension of size one is never used, so any value is contiguous.
        size > 1 and stride != right
        for size, stride, right in zip(spec.shape, spec.strides, expected, strict=True)
    ):
        return Refusal(
            f"a tensor of shape {list(spec.shape)} has strides {list(spec.strides)}; the format "
            f"knows contiguous ones"
        )
    return None


def _row_major(sizes: Any) -> Iterator[int]:
    stride = 1
    for size in sizes:
        yield stride
        # As PyTorch counts the strides of empty tensors.
        stride *= max(1, size)


def _evaluation(entry: Entry) -> TraceEvaluation:
    """What was measured. Absolute and relative errors were not and are NaN; the ratio to eager's
    own error stands beside them.
    """
    timing = entry.evidence["timing"]
    ratios = [
        check.get("value")
        for check in entry.evidence.get("checks", ())
        if check.get("name") == "numerics"
    ]
    worst = max((ratio for ratio in ratios if ratio is not None), default=None)
    extra = {"rms_error_over_eager": worst, "low": timing["low"], "baseline": timing["baseline"]}
    return TraceEvaluation(
        status="PASSED",
        hardware=entry.target.sku or entry.target.device,
        timestamp=entry.created,
        libs={"torch": entry.target.torch, "torch-cudal1": entry.package},
        # NaN and not 0: these errors were not measured. JSON has no NaN, so it is text.
        correctness={"max_relative_error": "NaN", "max_absolute_error": "NaN", "extra": extra},
        performance={
            # The format counts milliseconds, the judge microseconds.
            "latency_ms": float(timing["candidate_us"]) / 1e3,
            "reference_latency_ms": float(timing["baseline_us"]) / 1e3,
            "speedup_factor": float(timing["speedup"]),
        },
    )


def _write_argument(arg: Any) -> str:
    if isinstance(arg, Value):
        return f"v{arg.index}"
    if isinstance(arg, tuple):
        return f"[{', '.join(map(_write_argument, arg))}]"
    if isinstance(arg, float) and not math.isfinite(arg):
        # `repr` of an infinite or NaN float is a bare name, which is no Python expression.
        return f"float({str(arg)!r})"
    if isinstance(arg, complex):
        return f"complex({_write_argument(arg.real)}, {_write_argument(arg.imag)})"
    if isinstance(arg, torch.device):
        return f"torch.device({arg.type!r})"
    return (
        str(arg) if isinstance(arg, (torch.dtype, torch.layout, torch.memory_format)) else repr(arg)
    )
