"""Detector `sanitizer`: machine code under NVIDIA's compute-sanitizer, in a process of its own,
with torch's caching of blocks off.

The tool comes with the CUDA toolkit; where it is absent, or cannot run in the sandbox, the check
says so and passes. So it does for strangers' code: what the tool starts must be able to write all
of /proc, which is too much for them. Its report is a file in the child's scratch folder: a Program
cannot write there, the Python of a source can. memcheck sees accesses outside allocations;
racecheck sees shared memory only; none of them sees what a run on other inputs would do.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child

__all__ = ["read_report", "sanitizer"]

_NAME = "compute-sanitizer"
_PLACES = (
    "/usr/local/cuda/bin",
    "/usr/local/cuda/compute-sanitizer",
    "/opt/cuda/bin",
    "/opt/cuda/extras/compute-sanitizer",
)
_REPORT = "sanitizer.log"
_DEADLINE_S = 600.0  # of one call: the tool slows a kernel down tenfold and more
_END_S = 60.0
_BYTES = 256 << 20
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_FIRST = re.compile(
    r"=+ +((?:Invalid|Uninitialized|Error|Barrier|Race|Program hit|Potential|Divergent|Misaligned|Malloc|Free)\b.*)"
)


def sanitizer(trial: Trial) -> list[Check]:
    """Each tool of the profile over one call; one check per tool."""
    reason = _not_applicable(trial)
    if reason:
        return [Check("sanitizer", True, detail=f"not applicable: {reason}")]
    sample, _ = first_two(trial)
    checks: list[Check] = []
    for tool in trial.profile.sanitizers:
        checks.append(_under(trial, sample, tool))
        if not checks[-1].passed:
            break
    return checks


def _not_applicable(trial: Trial) -> str:
    if trial.device.type != "cuda":
        return "no GPU"
    if trial.child.limits.trust != "own":
        return "a stranger's code is not run under a tool"
    if not isinstance(trial.candidate, SourceCandidate) and not trial.candidate.program.launches:
        return "no machine code"
    if not trial.profile.sanitizers:
        return "the profile asks no tool"
    if sum(spec.size_bytes for spec in trial.subject.specs) > _BYTES:
        return f"inputs of more than {_BYTES >> 20} MiB would take too long"
    return "" if _tool() and shutil.which("env") else f"{_NAME} of the CUDA toolkit is not here"


def _tool() -> str | None:
    return shutil.which(_NAME) or next(
        (found for place in _PLACES if (found := shutil.which(_NAME, path=place))), None
    )


def _command(tool: str) -> tuple[str, ...]:
    """What starts the interpreter under a tool; whole paths, for the launcher searches nothing."""
    caching_off = (str(shutil.which("env")), "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
    return (
        *caching_off,
        str(_tool()),
        "--tool",
        tool,
        "--report-api-errors",
        "no",
        "--log-file",
        _REPORT,
    )


def _under(trial: Trial, sample: Sample, tool: str) -> Check:
    limits = replace(trial.child.limits, deadline_s=_DEADLINE_S)
    failed = ""
    try:
        with Child(limits, trial.contract, under=_command(tool)) as child:
            other = replace(trial, child=child, samples={}, results={}, references=set(), state=[])
            try:
                other.load(other.slot, other.candidate)
                other.run(other.hand(sample))
            except CandidateFailure as error:
                failed = f"{error.stage}: {error.found}"
            child.finish(_END_S)
            return read_report(child.scratch / _REPORT, tool, failed)
    except SandboxError as error:
        return Check(
            "sanitizer",
            True,
            detail=f"not applicable: {tool} could not start here: {error.found[:200]}",
        )


def read_report(path: Path, tool: str, failed: str = "") -> Check:
    """The check that a report of compute-sanitizer makes. `failed`: how the call under the tool
    ended, "" if it did not fail.
    """
    text = path.read_text(errors="replace") if path.exists() else ""
    counts: list[int] = [int(a or b) for a, b in _SUMMARY.findall(text)]
    first = _FIRST.search(text)
    total = sum(counts)
    if first is not None or total:
        what = first.group(1)[:200] if first else f"{total} errors"
        return Check("sanitizer", False, float(max(total, 1)), 0.0, f"{tool}: {what}")
    if failed:
        return Check(
            "sanitizer", False, detail=f"{tool}: the call failed under the tool: {failed[:200]}"
        )
    if not counts:
        return Check("sanitizer", True, detail=f"not applicable: {tool} left no summary here")
    return Check("sanitizer", True, 0.0, 0.0, f"{tool}: no errors")
