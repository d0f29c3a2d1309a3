"""Kernel families (softmax, norms, reductions, scans, losses, pooling, attention) against eager,
torch.compile and a copy.

    python -m benchmarks.bench_families [--only NAME] [--per-case 4] [--budget-s 240] [--device cuda] [--out families.json]

Of each case up to `--per-case` proposals are built here, checked against float64 and timed. The
fastest right one is then timed in turns with eager, torch.compile and a copy of the same bytes:
what the case's graph reads and writes at least, once each. The kernel runs in the case's whole
graph, whose other steps are PyTorch's. Times are wall time of single calls on a cold L2 cache, host
work included. A case without a kernel, with a wrong one or an error is a row with the reason. The
benchmark accepts no kernel for use: that is the task of `torch_cudal1/judge`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.compare import Comparison, Reference, compare, make_reference
from benchmarks.family_cases import CASES, FamilyCase
from benchmarks.timing import Run, collect_samples
from torch_cudal1.core.errors import Cudal1Error, NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.captured import capture_call_graphs, get_examples, lower_captured
from torch_cudal1.graph.fusion.partition import Partition, partition, splice
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.judge.benchmark.timing import measure_device_time_us
from torch_cudal1.judge.reference.float64 import compute_exact_outputs
from torch_cudal1.kernels import Proposal, build, propose
from torch_cudal1.kernels.registry import trace
from torch_cudal1.runtime.executor import prepare

__all__ = ["CapturedCase", "Options", "capture_case", "format_row", "main", "measure_case"]

Row: TypeAlias = dict[str, Any]

_TIMED_CALLS = 5  # to tell proposals apart
_EAGER_RUNS = 2  # atomics let some of eager's results differ from run to run
# of a compiler, a driver, memory; anything else is a mistake of this file
_FAILURES = (
    Cudal1Error,
    RuntimeError,
    OSError,
)


@dataclass(frozen=True)
class Options:
    """`sm`: the compute capability to build for (90). `end`: on `time.monotonic`, until when a
    proposal may begin.
    """

    device: torch.device
    sm: int
    per_case: int
    rounds: int
    end: float


@dataclass(frozen=True)
class CapturedCase:
    """A case on a device: the module and its inputs, the same as a whole-graph Program with its
    tensors, and its fusion groups.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    program: Program
    tensors: list[Tensor]
    parts: Partition

    @property
    def traffic_bytes(self) -> int:
        """The memory traffic of any kernel: every input once, every result once."""
        specs = value_specs(self.program)
        results = [specs[index] for index in set(self.program.outputs) if index is not None]
        return sum(spec.size_bytes for spec in (*self.program.inputs, *results))


def capture_case(case: FamilyCase, device: torch.device) -> CapturedCase:
    """Make the case with seed 0 and capture it. Raises NotLowerableError for a call that is no
    graph.
    """
    with torch.random.fork_rng(), device:
        torch.manual_seed(0)
        module, inputs = case.module(), case.inputs()
    call, traced = capture_call_graphs(module, inputs, {})
    (graph,) = traced.graphs
    lowered = lower_captured(graph, module)
    examples = get_examples(lowered, graph, call)
    assert examples is not None, "an inference graph has all its inputs"
    # a module's own tensors change when it is called (running statistics): the Program keeps what
    # they are now
    tensors = [
        t.clone() if at in graph.static else t
        for at, t in zip(lowered.order, examples, strict=True)
    ]
    return CapturedCase(
        module,
        inputs,
        lowered.region.program,
        tensors,
        partition(lowered.region, products=case.products),
    )


def _name_outputs(outputs: Sequence[Tensor | None]) -> dict[str, Tensor]:
    return {
        f"output {number}": tensor for number, tensor in enumerate(outputs) if tensor is not None
    }


def compute_reference(captured: CapturedCase, device: torch.device) -> Reference | Refusal:
    """The results in float64, and eager's with their errors."""
    exact = compute_exact_outputs(captured.program, captured.tensors, device)
    if isinstance(exact, Refusal):
        return exact
    eager = prepare(captured.program, device)
    return make_reference(
        _name_outputs(exact),
        [_name_outputs(eager(list(captured.tensors))) for _ in range(_EAGER_RUNS)],
    )


def list_choices(captured: CapturedCase, options: Options) -> list[list[Proposal | None]]:
    """The attempts to make. Each has a proposal for every fusion group: its n-th, or its last where
    it has fewer; None for a group that is left to PyTorch.
    """
    proposals = [
        propose(group.region.program, options.sm, most=options.per_case)
        for group in captured.parts.groups
    ]
    count = max(map(len, proposals), default=0)
    return [
        [
            group_proposals[min(number, len(group_proposals) - 1)] if group_proposals else None
            for group_proposals in proposals
        ]
        for number in range(count)
    ]


def explain_missing_kernel(parts: Partition) -> str:
    """The reason why a case has no attempt."""
    if not parts.groups:
        return f"no fusion group: {'; '.join(sorted(parts.reasons_left_out))}"
    try:
        families = [trace(group.region.program).family for group in parts.groups]
    except NotLowerableError as error:
        return str(error)
    return f"no proposal of family {', '.join(families)}"


def try_choice(
    captured: CapturedCase,
    chosen: Sequence[Proposal | None],
    expected_outputs: Reference,
    options: Options,
) -> tuple[Row, Runner | None]:
    """Build, check and time one attempt: its facts, and the runner if it is right. A wrong one is
    not timed.
    """
    fact: Row = {
        "configs": [None if proposal is None else dict(proposal.config) for proposal in chosen]
    }
    try:
        pairs = [
            (group, proposal)
            for group, proposal in zip(captured.parts.groups, chosen, strict=True)
            if proposal is not None
        ]
        kernels = {
            group: build(group.region.program, proposal, options.sm) for group, proposal in pairs
        }
        runner = prepare(splice(captured.program, kernels), options.device)
        verdict = compare(_name_outputs(runner(list(captured.tensors))), expected_outputs)
        if not verdict.passed:
            return fact | {"wrong": verdict.reason}, None
        us = measure_device_time_us(
            lambda: runner(list(captured.tensors)), options.device, calls=_TIMED_CALLS
        )
    except _FAILURES as error:
        return fact | {"failed": _describe_error(error)}, None
    return fact | {"device_us": round(us, 1), "error_ratio": verdict.error_ratio}, runner


def find_best_kernel(
    captured: CapturedCase, expected_outputs: Reference, options: Options
) -> tuple[Row, Runner | None]:
    """Every attempt, and the fastest right runner; without one, the status and reason of the row."""
    choices_to_try = list_choices(captured, options)
    if not choices_to_try:
        return {"status": "no kernel", "reason": explain_missing_kernel(captured.parts)}, None
    attempts: list[tuple[Row, Runner | None]] = []
    for chosen in choices_to_try:
        if attempts and time.monotonic() > options.end:
            break
        attempts.append(try_choice(captured, chosen, expected_outputs, options))
    facts = [fact for fact, _ in attempts]
    right = [(fact, runner) for fact, runner in attempts if runner is not None]
    if not right:
        wrong = next((fact["wrong"] for fact in facts if "wrong" in fact), None)
        reason = wrong or next(fact["failed"] for fact in facts)
        return {"status": "wrong" if wrong else "failed", "reason": reason, "tried": facts}, None
    fact, runner = min(right, key=lambda fact_and_runner: fact_and_runner[0]["device_us"])
    return {"configs": fact["configs"], "error_ratio": fact["error_ratio"], "tried": facts}, runner


def list_contenders(
    captured: CapturedCase, runner: Runner | None, options: Options
) -> tuple[dict[str, Run], str]:
    """The contenders by name, and why torch.compile is not among them ("" when it is)."""
    # half the bytes are read, half are written
    source = torch.zeros(max(1, captured.traffic_bytes // 8), device=options.device)
    target = torch.empty_like(source)
    runs: dict[str, Run] = {
        "eager": lambda: captured.module(*captured.inputs),
        "copy": lambda: target.copy_(source),
    }
    if runner is not None:
        runs["kernel"] = lambda: runner(list(captured.tensors))
    torch._dynamo.reset()
    compiled = torch.compile(captured.module)
    try:
        compiled(*captured.inputs)
    except _FAILURES as error:
        return runs, _describe_error(error)
    return runs | {"torch.compile": lambda: compiled(*captured.inputs)}, ""


def time_contenders(captured: CapturedCase, runner: Runner | None, options: Options) -> Row:
    """Medians in microseconds, and the kernel's speed-ups over each of the others. `of_copy`: the
    copy's time over the kernel's.
    """
    runs, problem = list_contenders(captured, runner, options)
    samples = collect_samples(runs, device=str(options.device), rounds=options.rounds)
    row: Row = {"us": {name: round(samples.median_us(name), 1) for name in runs}}
    if problem:
        row["compile_failed"] = problem
    row["copy_bytes_per_s"] = round(captured.traffic_bytes / samples.median_us("copy") * 1e6)
    if runner is not None:
        row["vs_eager"] = samples.speedup("eager", "kernel")
        row["vs_compile"] = None if problem else samples.speedup("torch.compile", "kernel")
        ratios = [ratio for ratio in (row["vs_eager"], row["vs_compile"]) if ratio is not None]
        row["vs_better"] = min(ratios, key=lambda ratio: ratio["speedup"])
        row["of_copy"] = samples.speedup("copy", "kernel")
    return row


def measure_case(case: FamilyCase, options: Options) -> Row:
    """The row of a case. A kernel is checked before it is timed, and again after."""
    row: Row = {"family": case.family, "case": case.name}
    try:
        with torch.no_grad():
            captured = capture_case(case, options.device)
            row["bytes"] = captured.traffic_bytes
            expected_outputs = compute_reference(captured, options.device)
            if isinstance(expected_outputs, Refusal):
                return row | {
                    "status": "failed",
                    "reason": f"no result in float64: {expected_outputs.reason}",
                }
            result, runner = find_best_kernel(captured, expected_outputs, options)
            row |= {"status": "ok", "reason": ""} | result
            timings = time_contenders(captured, runner, options)
            recheck = (
                Comparison(True, None)
                if runner is None
                else compare(_name_outputs(runner(list(captured.tensors))), expected_outputs)
            )
            if not recheck.passed:
                return row | {"status": "wrong", "reason": f"after it was timed: {recheck.reason}"}
            return row | timings
    except _FAILURES as error:  # a kernel that failed before it may have broken what came after: its reason is the one to know
        return row | {"status": "failed", "reason": row.get("reason") or _describe_error(error)}


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _release_memory(device: torch.device) -> None:
    """Release memory: the float64 result of the next case may need all of it."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _make_unstarted_row(case: FamilyCase, reason: str) -> Row:
    return {"family": case.family, "case": case.name, "status": "failed", "reason": reason}


def format_row(row: Mapping[str, Any]) -> str:
    """A row as a line for a terminal."""
    us = row.get("us", {})
    times = " ".join(
        f"{name} {us[name]:.1f}"
        for name in ("eager", "torch.compile", "copy", "kernel")
        if name in us
    )
    if row["status"] != "ok":
        return f"{row['case']:46} {row['status']}: {row['reason'][:120]}; us: {times}"
    error = "-" if row["error_ratio"] is None else f"{row['error_ratio']:.2f}"
    gain, share = row["vs_better"], row["of_copy"]
    interval = f"[{gain['low']:.3f}, {gain['high']:.3f}]"
    figures = f"{gain['speedup']:.3f}x {interval}, {share['speedup']:.2f} of copy, error {error} of eager's"
    return f"{row['case']:46} {figures}; us: {times}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", action="append", default=[], help="cases whose name or family holds this"
    )
    parser.add_argument("--per-case", type=int, default=4, help="proposals tried of each case")
    parser.add_argument(
        "--rounds", type=int, default=30, help="samples of each contender, at least 14"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=240.0,
        help="cases that would begin later are rows without figures",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("families.json"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write after each case; 1 when a case failed, was wrong or was not started, or
    when the options select none.
    """
    args = _arguments(argv)
    end, environment = time.monotonic() + args.budget_s, report.environment()
    major, minor = environment["capability"] or (9, 0)
    options = Options(
        torch.device(args.device), 10 * major + minor, args.per_case, args.rounds, end
    )
    shown_options = {
        "per_case": args.per_case,
        "rounds": args.rounds,
        "budget_s": args.budget_s,
        "device": args.device,
    }
    cases = [
        case
        for case in CASES
        if not args.only or any(word in case.name or word == case.family for word in args.only)
    ]
    rows: list[Row] = []
    for number, case in enumerate(cases, 1):
        rows.append(
            measure_case(case, options)
            if time.monotonic() < end
            else _make_unstarted_row(case, "the budget was spent")
        )
        print(format_row(rows[-1]), flush=True)
        _release_memory(options.device)
        # a run that is killed says so
        not_started = [
            _make_unstarted_row(case, "the run ended before it") for case in cases[number:]
        ]
        report.save(
            args.out,
            report.make_document(
                "families", shown_options, [*rows, *not_started], environment=environment
            ),
        )
    return int(not rows or any(row["status"] in ("failed", "wrong") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
