"""Detectors of order and concurrency: several threads and instances, side streams, and the caller's
own CUDA graph.

Streams and graphs exist on CUDA only; elsewhere these checks say so. Races that do not fire are not
found.
"""

from __future__ import annotations

from functools import partial

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    agreement,
    attempted,
    not_applicable,
    pair_of,
    summed_up,
)
from torch_cudal1.judge.checks.numerics import first_two
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.region_reference import Result
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure

__all__ = ["capture", "reentrancy", "stream_order"]

_THREADS = 4
_NO_STREAMS = "there are no streams on the CPU"


def reentrancy(trial: Trial) -> list[Check]:
    """Two instances, each called by two threads at once, on CUDA each on its stream: every result
    is right.
    """
    first, second = first_two(trial)
    slots = (trial.slot, f"{trial.slot} beside it")
    trial.load(slots[1], trial.candidate)
    jobs = [
        (slots[turn % 2], sample)
        for turn, sample in enumerate((first, second, trial.sibling(first), trial.sibling(second)))
    ]
    budget_calls = trial.rounds(trial.profile.reentrant, 0.2)
    trial.present(*(sample for _, sample in jobs))
    asked = [(slot, sample.name) for slot, sample in jobs]
    answer, flat = trial.fetched("reenter", jobs=asked, calls=max(budget_calls, 2 * _THREADS))
    width = len(trial.subject.outputs)
    found: list[Agreement | None] = []
    try:
        for number, (thread, count) in enumerate(answer["found"]):
            if count != width:
                raise CandidateFailure(
                    "reenter", f"{count} outputs, expected {width}", "reentrancy"
                )
            sample = jobs[int(thread)][1]
            outputs = flat[number * width : (number + 1) * width]
            found.append(
                agreement(
                    trial,
                    sample,
                    Result(outputs, sample.reference.facts, sample.reference.tree),
                    f"thread {thread}",
                )
            )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CandidateFailure("reenter", f"an unusable answer: {error}", "protocol") from error
    checks = summed_up("reentrancy", found, "no result")
    detail = f"{_THREADS} threads on 2 instances, {answer['calls']} calls, {len(found)} different results"
    return [
        Check(
            "reentrancy",
            check.passed,
            check.value,
            check.limit,
            detail if check.passed else check.detail,
        )
        for check in checks
    ]


def stream_order(trial: Trial) -> list[Check]:
    """On a stream of the caller's: a slow producer, the call, and a consumer that overwrites the
    inputs at once.
    """
    if trial.device.type != "cuda":
        return not_applicable("stream_order", _NO_STREAMS)
    first, _ = first_two(trial)
    trial.run(first)
    return summed_up(
        "stream_order",
        [attempted(trial, "side stream", partial(_on_side_stream, trial, first))],
        "",
    )


def _on_side_stream(trial: Trial, sample: Sample) -> Agreement:
    answer, outputs = trial.fetched("side_stream", inputs=sample.name)
    views = [
        bool(facts and facts["inputs"]) for facts in sample.reference.facts
    ]  # they show what the consumer has overwritten
    outputs = [
        expected if view else out
        for out, expected, view in zip(outputs, sample.reference.outputs, views, strict=True)
    ]
    return agreement(
        trial, sample, Result(outputs, answer["facts"], sample.reference.tree), "side stream"
    )


def capture(trial: Trial) -> list[Check]:
    """The call captured in the caller's CUDA graph and replayed on new data, if the reference's can
    be.
    """
    if trial.device.type != "cuda":
        return not_applicable("capture", "there are no CUDA graphs on the CPU")
    if not trial.profile.replays:
        return not_applicable("capture", "the profile asks for no replays")
    first, _ = first_two(trial)
    subject = pair_of(trial)
    if subject is not None and not subject.capturable(first.inputs):
        return not_applicable("capture", "the reference itself cannot be captured")
    samples = [
        first,
        *(trial.sibling(first, "normal", number) for number in range(trial.profile.replays - 1)),
    ]
    trial.run(first)
    return summed_up(
        "capture", [attempted(trial, "captured", partial(_replayed, trial, samples))], ""
    )


def _replayed(trial: Trial, samples: list[Sample]) -> Agreement:
    trial.present(*samples)
    _, flat = trial.fetched("capture", sets=[sample.name for sample in samples])
    width = len(trial.subject.outputs)
    if len(flat) != width * len(samples):
        raise CandidateFailure(
            "capture",
            f"{len(flat)} outputs of {len(samples)} replays, expected {width} each",
            "capture",
        )
    found = Agreement("captured")
    for number, sample in enumerate(samples):
        outputs = flat[number * width : (number + 1) * width]
        what = f"replay {number + 1} of {len(samples)} on new data"
        found = agreement(
            trial, sample, Result(outputs, sample.reference.facts, sample.reference.tree), what
        )
        if found.problem:
            break
    return found
