"""Checks of order and concurrency: several threads and instances, side streams, and the caller's
own CUDA graph.

Streams and graphs exist on CUDA only; elsewhere these checks say so. Races that do not fire are not
found.
"""

from __future__ import annotations

from functools import partial

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_result,
    disagree_on_error,
    get_source_reference,
    report_not_applicable,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import Result
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = [
    "CAPTURE",
    "REENTRANCY",
    "STREAM_ORDER",
    "check_capture",
    "check_reentrancy",
    "check_stream_order",
]

_CONCURRENT_THREADS = 4
_NO_STREAMS = "there are no streams on the CPU"


def check_reentrancy(trial: Trial) -> list[CheckResult]:
    """Two instances, each called by two threads at once, on CUDA each on its stream: every result
    is right.
    """
    # Siblings share parameters with their base but not inputs: a result of another thread is a
    # wrong one.
    first, second = trial.first_two
    slots = (trial.slot, f"{trial.slot} beside it")
    # Two instances in one process: buffers and symbols of a module or library would be shared by
    # both.
    trial.load(slots[1], trial.candidate)
    jobs = [
        (slots[turn % 2], sample)
        for turn, sample in enumerate(
            (first, second, trial.derive_sibling(first), trial.derive_sibling(second))
        )
    ]
    # At least two calls a thread, or no two calls overlap.
    budget_calls = trial.count_affordable_sets(trial.profile.reentrant, 0.2)
    # All at once: the threads in the child use these sets at the same time.
    trial.ensure_present(*(sample for _, sample in jobs))
    requests = [(slot, sample.name) for slot, sample in jobs]
    answer, flat = trial.fetch(
        "reenter", jobs=requests, calls=max(budget_calls, 2 * _CONCURRENT_THREADS)
    )
    width = len(trial.reference.outputs)
    agreements: list[Agreement | None] = []
    # The answer is another process's data: positions and counts in it may be anything.
    try:
        for number, (thread, count) in enumerate(answer["found"]):
            if count != width:
                raise CandidateFailure(
                    "reenter", f"{count} outputs, expected {width}", "reentrancy"
                )
            sample = jobs[int(thread)][1]
            outputs = flat[number * width : (number + 1) * width]
            agreements.append(
                compare_result(
                    trial,
                    sample,
                    Result(outputs, sample.expected.facts, sample.expected.tree),
                    f"thread {thread}",
                )
            )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CandidateFailure("reenter", f"an unusable answer: {error}", "protocol") from error
    checks = summarise("reentrancy", agreements, "no result")
    detail = f"{_CONCURRENT_THREADS} threads on 2 instances, {answer['calls']} calls, {len(agreements)} different results"
    return [
        CheckResult(
            "reentrancy",
            check.passed,
            check.value,
            check.limit,
            detail if check.passed else check.detail,
        )
        for check in checks
    ]


def check_stream_order(trial: Trial) -> list[CheckResult]:
    """On a stream of the caller's: a slow producer, the call, and a consumer that overwrites the
    inputs at once.
    """
    if trial.device.type != "cuda":
        return report_not_applicable("stream_order", _NO_STREAMS)
    first, _ = trial.first_two
    # Compilation and set-up happen in the first call, which may synchronise.
    trial.run(first)
    return summarise(
        "stream_order",
        [disagree_on_error(trial, "side stream", partial(_compare_on_side_stream, trial, first))],
        "",
    )


def _compare_on_side_stream(trial: Trial, sample: InputSet) -> Agreement:
    answer, outputs = trial.fetch("side_stream", inputs=sample.name)
    # they show what the consumer has overwritten
    views = [bool(facts and facts["inputs"]) for facts in sample.expected.facts]
    outputs = [
        expected if view else out
        for out, expected, view in zip(outputs, sample.expected.outputs, views, strict=True)
    ]
    return compare_result(
        trial, sample, Result(outputs, answer["facts"], sample.expected.tree), "side stream"
    )


def check_capture(trial: Trial) -> list[CheckResult]:
    """The call captured in the caller's CUDA graph and replayed on new data, if the reference's can
    be.
    """
    if trial.device.type != "cuda":
        return report_not_applicable("capture", "there are no CUDA graphs on the CPU")
    if not trial.profile.replays:
        return report_not_applicable("capture", "the profile asks for no replays")
    first, _ = trial.first_two
    reference = get_source_reference(trial)
    # What PyTorch itself cannot capture a candidate need not offer.
    if reference is not None and not reference.can_be_captured(first.inputs):
        return report_not_applicable("capture", "the reference itself cannot be captured")
    samples = [
        first,
        *(
            trial.derive_sibling(first, "normal", number)
            for number in range(trial.profile.replays - 1)
        ),
    ]
    # CUDA forbids allocation outside the pool and synchronisation in a capture; a first call may do
    # both.
    trial.run(first)
    return summarise(
        "capture",
        [disagree_on_error(trial, "captured", partial(_compare_replays, trial, samples))],
        "",
    )


def _compare_replays(trial: Trial, samples: list[InputSet]) -> Agreement:
    trial.ensure_present(*samples)
    _, flat = trial.fetch("capture", sets=[sample.name for sample in samples])
    width = len(trial.reference.outputs)
    # Outputs of replays are told apart by position only.
    if len(flat) != width * len(samples):
        raise CandidateFailure(
            "capture",
            f"{len(flat)} outputs of {len(samples)} replays, expected {width} each",
            "capture",
        )
    agreement = Agreement("captured")
    for number, sample in enumerate(samples):
        outputs = flat[number * width : (number + 1) * width]
        question = f"replay {number + 1} of {len(samples)} on new data"
        agreement = compare_result(
            trial, sample, Result(outputs, sample.expected.facts, sample.expected.tree), question
        )
        # The first wrong replay decides.
        if agreement.problem:
            break
    return agreement


STREAM_ORDER = CheckSpec(
    name="stream_order",
    run=check_stream_order,
    failure="hack",
    asks=(
        "on a GPU: called on a stream of yours between a slow producer and a consumer that "
        "overwrites the input at once"
    ),
)
CAPTURE = CheckSpec(
    name="capture",
    run=check_capture,
    since="standard",
    knobs=("replays",),
    asks=(
        "on a GPU: captured in your CUDA graph and replayed on new data, where the reference can be"
    ),
)
REENTRANCY = CheckSpec(
    name="reentrancy",
    run=check_reentrancy,
    since="standard",
    knobs=("reentrant", "budget_s"),
    asks="two instances, each called by two threads at once",
)
