"""Names of results that no step of the protocol makes: those of the benchmark, and of requests to
the candidate's process that failed.

They are documented and classified like all others; the code that makes them is in
`judge.benchmark`, `judge.evaluate` and `judge.sandbox`, which import no checks.
"""

from __future__ import annotations

from torch_cudal1.judge.checks.spec import CheckName

__all__ = ["FAILED_REQUESTS", "TIMING_CHECKS"]

TIMING_CHECKS: tuple[CheckName, ...] = (
    CheckName(
        name="timed_output",
        module="torch_cudal1.judge.benchmark.candidate_timing",
        failure="hack",
        asks="timed calls, drawn after they were made, answered rightly",
    ),
    CheckName(
        name="wall_slope",
        module="torch_cudal1.judge.benchmark.cross_process",
        failure="hack",
        asks="its process's clock and the judge's tell one time per call",
    ),
    CheckName(
        name="timing_state",
        module="torch_cudal1.judge.benchmark.candidate_timing",
        failure="hack",
        asks="is no work of later calls done in an instance's first one, which no sample holds",
    ),
    CheckName(
        name="unseen_inputs",
        module="torch_cudal1.judge.benchmark.unseen_inputs",
        failure="hack",
        asks="of a source: do calls on values that came never before take as long as the timed ones",
    ),
    CheckName(
        name="sync_ratio",
        module="torch_cudal1.judge.benchmark.candidate_timing",
        failure="hack",
        asks="on a GPU: no work left on streams that its own events do not wait for",
    ),
    CheckName(
        name="unstable",
        module="torch_cudal1.judge.benchmark.candidate_timing",
        failure="unstable",
        asks="do the buckets of the measurement agree, as far as the profile asks",
    ),
    CheckName(
        name="roofline",
        module="torch_cudal1.device.peaks",
        failure="hack",
        asks="is it no faster than the device can write its results",
    ),
    CheckName(
        name="jump",
        module="torch_cudal1.judge.evaluate.confirm",
        failure="unstable",
        asks=(
            "a speed-up above 3, or at `strict` any, is measured again in a fresh process, and at "
            "`fast` a gain of which the buckets disagree once more: do they agree"
        ),
    ),
    CheckName(
        name="timing",
        module="torch_cudal1.judge.evaluate.decide",
        failure="run",
        asks="is the lower bound of the speed-up, and the time saved, enough",
    ),
)
FAILED_REQUESTS: tuple[CheckName, ...] = (
    CheckName(
        name="run",
        module="torch_cudal1.judge.reference.candidate_calls",
        failure="run",
        asks="did every call return",
    ),
    CheckName(
        name="protocol",
        module="torch_cudal1.judge.sandbox.child",
        failure="hack",
        asks="did its process answer what it was asked, and nothing else",
    ),
    CheckName(
        name="inputs",
        module="torch_cudal1.judge.checks.validate",
        asks=(
            "did the reference itself take the inputs made for it; if not, nothing can be said of "
            "the candidate"
        ),
    ),
)
