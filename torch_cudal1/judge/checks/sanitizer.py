"""Check `sanitizer`: machine code under NVIDIA's compute-sanitizer, in a process of its own,
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
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child

__all__ = ["SANITIZER", "check_with_sanitizer", "read_report"]

_TOOL_NAME = "compute-sanitizer"
_TOOL_FOLDERS = (
    "/usr/local/cuda/bin",
    "/usr/local/cuda/compute-sanitizer",
    "/opt/cuda/bin",
    "/opt/cuda/extras/compute-sanitizer",
)
_REPORT_NAME = "sanitizer.log"
_DEADLINE_S = 600.0  # of one call: the tool slows a kernel down tenfold and more
_END_S = 60.0
_MAX_INPUT_BYTES = 256 << 20
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_FIRST_ERROR = re.compile(
    r"=+ +((?:Invalid|Uninitialized|Error|Barrier|Race|Program hit|Potential|Divergent|Misaligned|Malloc|Free)\b.*)"
)


def check_with_sanitizer(trial: Trial) -> list[CheckResult]:
    """Each tool of the profile over one call; one check per tool."""
    if refusal := _find_obstacle(trial):
        return [CheckResult("sanitizer", True, detail=f"not applicable: {refusal}")]
    sample, _ = trial.first_two
    checks: list[CheckResult] = []
    for tool in trial.profile.sanitizers:
        checks.append(_run_under_tool(trial, sample, tool))
        if not checks[-1].passed:
            break
    return checks


def _find_obstacle(trial: Trial) -> Refusal | None:
    if trial.device.type != "cuda":
        return Refusal("no GPU")
    # The tool must be able to write all of /proc, which is more than a stranger's code may.
    if trial.child.limits.trust != "own":
        return Refusal("a stranger's code is not run under a tool")
    if not isinstance(trial.candidate, SourceCandidate) and not trial.candidate.program.launches:
        return Refusal("no machine code")
    if not trial.profile.sanitizers:
        return Refusal("the profile asks no tool")
    # The tool slows kernels down tenfold and more.
    if sum(spec.size_bytes for spec in trial.reference.specs) > _MAX_INPUT_BYTES:
        return Refusal(f"inputs of more than {_MAX_INPUT_BYTES >> 20} MiB would take too long")
    if not (_find_tool() and shutil.which("env")):
        return Refusal(f"{_TOOL_NAME} of the CUDA toolkit is not here")
    return None


def _find_tool() -> str | None:
    return shutil.which(_TOOL_NAME) or next(
        (path for place in _TOOL_FOLDERS if (path := shutil.which(_TOOL_NAME, path=place))), None
    )


def _build_command(tool: str) -> tuple[str, ...]:
    """What starts the interpreter under a tool; whole paths, for the launcher searches nothing."""
    # Blocks that the caching allocator hands out lie within one large allocation, where memcheck
    # sees no access as out of bounds.
    caching_off = (str(shutil.which("env")), "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
    return (
        *caching_off,
        str(_find_tool()),
        "--tool",
        tool,
        "--report-api-errors",
        "no",
        "--log-file",
        _REPORT_NAME,
    )


def _run_under_tool(trial: Trial, sample: InputSet, tool: str) -> CheckResult:
    limits = replace(trial.child.limits, deadline_s=_DEADLINE_S)
    failed = ""
    try:
        # A process of its own: the tool must be there when CUDA starts.
        with Child(limits, trial.contract, tool=_build_command(tool)) as child:
            other = replace(trial, child=child, samples={}, results={}, references=set(), state=[])
            try:
                other.load(other.slot, other.candidate)
                other.run(other.hand_over(sample))
            except CandidateFailure as error:
                failed = f"{error.stage}: {error.found}"
            # The report is complete when the process has ended.
            child.finish(_END_S)
            return read_report(child.scratch / _REPORT_NAME, tool, failed)
    # A tool that does not start says nothing of the candidate.
    except SandboxError as error:
        return CheckResult(
            "sanitizer",
            True,
            detail=f"not applicable: {tool} could not start here: {error.found[:200]}",
        )


def read_report(path: Path, tool: str, failed: str = "") -> CheckResult:
    """The check that a report of compute-sanitizer makes. `failed`: how the call under the tool
    ended, "" if it did not fail.
    """
    text = path.read_text(errors="replace") if path.exists() else ""
    counts: list[int] = [int(a or b) for a, b in _SUMMARY.findall(text)]
    first = _FIRST_ERROR.search(text)
    total = sum(counts)
    # A report of an error counts, even where the summary was never written because the process
    # died.
    if first is not None or total:
        first_error = first.group(1)[:200] if first else f"{total} errors"
        return CheckResult("sanitizer", False, float(max(total, 1)), 0.0, f"{tool}: {first_error}")
    # The call passed without the tool, so failing under it is the candidate's.
    if failed:
        return CheckResult(
            "sanitizer", False, detail=f"{tool}: the call failed under the tool: {failed[:200]}"
        )
    # No summary means that the tool did not finish, not that there were no errors.
    if not counts:
        return CheckResult("sanitizer", True, detail=f"not applicable: {tool} left no summary here")
    return CheckResult("sanitizer", True, 0.0, 0.0, f"{tool}: no errors")


SANITIZER = CheckSpec(
    name="sanitizer",
    run=check_with_sanitizer,
    since="standard",
    knobs=("sanitizers",),
    asks=(
        "on a GPU, where NVIDIA's compute-sanitizer is installed, of code whose maker you "
        "trust: no access outside allocations, and at `strict` no races in shared memory "
        "and no reads of unwritten memory. Strangers' sources are not asked, because the "
        "tool needs more of the system than they get"
    ),
)
