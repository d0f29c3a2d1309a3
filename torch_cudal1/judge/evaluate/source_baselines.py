"""Benchmarks the ways to run a reference module that PyTorch itself offers: a source candidate must
beat the fastest.

Everything happens in the reference's process, beside which no candidate runs.
`baseline_benchmark` does the same for regions.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.ir.schedule import EAGER, INDUCTOR, INDUCTOR_GRAPH, Schedule
from torch_cudal1.judge.evaluate.decide import choose_baseline
from torch_cudal1.judge.reference.compare import is_grossly_equal
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference, load_module
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.wire.call_spec import RunMode
from torch_cudal1.judge.wire.channel import load_tensors

__all__ = [
    "Baselines",
    "LostReferenceProcess",
    "load_eager_baseline",
    "name_slot",
    "rank_source_baselines",
]

_BUDGET_S = 5.0
_COMPILE_S = 600.0  # a large module under Inductor on few cores
# The modes of `torch.compile`; "reduce-overhead" is the one with CUDA graphs.
_COMPILED: dict[Schedule, str] = {
    EAGER: "",
    INDUCTOR: "default",
    INDUCTOR_GRAPH: "reduce-overhead",
}


@dataclass(frozen=True)
class Baselines:
    """The winner, medians in microseconds per call, why others did not run, and the names of the
    input sets that the reference's process holds.
    """

    best: Schedule
    medians_us: Mapping[str, float]
    failures: Mapping[str, str]
    sets: tuple[str, ...] = field(default=(), repr=False)


class LostReferenceProcess(ReferenceFailure):
    """A baseline ended the reference's process: `name` says which, so that the benchmark can run
    again without it.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__("benchmarking the baselines", reason)
        self.name = name
        self.args = (name, reason)  # so that it can be pickled


def name_slot(reference: SourceReference, name: Schedule) -> str:
    """The slot of the oracle that holds a baseline of a reference."""
    return f"baseline {reference.key[:16]} {name}"


def rank_source_baselines(
    reference: SourceReference,
    sets: Sequence[Sequence[torch.Tensor]],
    *,
    eager_only: bool = False,
    lost: Mapping[str, str] | None = None,
) -> Baselines:
    """Benchmark eager, torch.compile and (on CUDA) torch.compile with CUDA graphs on those input sets.

    What cannot run, or does not yield eager's result, is excluded with the reason; so is what
    is in `lost` from the start. Raises LostReferenceProcess, and ReferenceFailure if eager is
    out.
    """
    names: list[Schedule] = [EAGER] if eager_only else [EAGER, INDUCTOR]
    # There are CUDA graphs on CUDA only.
    if reference.device.type == "cuda" and not eager_only:
        names.append(INDUCTOR_GRAPH)
    names = [name for name in names if name not in (lost or {})]
    set_names = [
        _put_inputs(reference.oracle, f"inputs {reference.key[:16]} {index}", tensors)
        for index, tensors in enumerate(sets)
    ]
    failures = dict(lost or {})
    # Eager comes first in `names`: its outputs are what the others are compared with.
    expected: Outputs | None = None
    for name in names:
        try:
            outputs = _run_baseline(reference, name, set_names[0])
            if expected is None:
                expected = outputs
            # Only gross differences exclude: Inductor fuses and reorders, so its rounding is not
            # eager's.
            elif not all(is_grossly_equal(a, b) for a, b in zip(outputs, expected, strict=True)):
                failures[name] = "its result is not eager's"
        except CandidateFailure as error:
            # With its process all slots are lost, so the caller must begin again without this
            # baseline.
            if not reference.oracle.usable:
                raise LostReferenceProcess(name, error.found) from error
            failures[name] = error.found
        # `zip(strict=True)` raises it where the number of outputs differs.
        except ValueError as error:
            failures[name] = f"other outputs than eager's: {error}"
    # Eager is the reference itself: a candidate could not be compared with anything.
    if "eager" in failures:
        raise ReferenceFailure("benchmarking the baselines", failures["eager"])
    medians = _time_baselines(
        reference, [name for name in names if name not in failures], set_names
    )
    best = next(name for name in names if name == choose_baseline(medians))
    telemetry.record(
        "judge", "baselines", reference.key[:12], best=best, medians_us=medians, failures=failures
    )
    return Baselines(best, medians, failures, tuple(set_names))


def load_eager_baseline(
    reference: SourceReference, sets: Sequence[Sequence[torch.Tensor]]
) -> Baselines:
    """Load eager alone, ready to be timed. Raises ReferenceFailure."""
    set_names = [
        _put_inputs(reference.oracle, f"inputs {reference.key[:16]} {index}", tensors)
        for index, tensors in enumerate(sets)
    ]
    try:
        _run_baseline(reference, EAGER, set_names[0])
    except CandidateFailure as error:
        raise ReferenceFailure("running the reference", error.found) from error
    return Baselines(EAGER, {}, {}, tuple(set_names))


def _run_baseline(reference: SourceReference, name: Schedule, inputs: str) -> Outputs:
    oracle = reference.oracle
    mode = RunMode(compiled=_COMPILED[name])
    load_module(oracle, name_slot(reference, name), reference.text, reference.form, mode)
    path = oracle.reserve_file()
    # The first call compiles, hence the long deadline.
    answer = oracle.call(
        "run", slot=name_slot(reference, name), inputs=inputs, path=str(path), deadline_s=_COMPILE_S
    )
    outputs = load_tensors(answer["layout"], path, reference.device)
    path.unlink(missing_ok=True)
    return outputs


def _time_baselines(
    reference: SourceReference, names: Sequence[Schedule], sets: Sequence[str]
) -> dict[str, float]:
    slots = {name: name_slot(reference, name) for name in names}
    try:
        answer = reference.oracle.call(
            "bench", slots=list(slots.values()), sets=list(sets), budget_s=_BUDGET_S
        )
        return {
            name: statistics.median(float(value) for value in answer["samples"][slot])
            for name, slot in slots.items()
        }
    except CandidateFailure as error:
        raise ReferenceFailure("benchmarking the baselines", error.found) from error


def _put_inputs(oracle: Child, name: str, tensors: Sequence[torch.Tensor]) -> str:
    try:
        oracle.put(name, tensors)
    except CandidateFailure as error:
        raise ReferenceFailure("benchmarking the baselines", error.found) from error
    return name
