"""Checks of history: results that depend on earlier calls, on addresses or on a cache; bits that
vary from run to run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.linalg import vector_norm

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_call,
    compare_result,
    eager_refuses,
    get_source_reference,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.region_reference import Outputs, Result
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.channel import storage_extent
from torch_cudal1.judge.wire.tensor_bits import all_same_bits

__all__ = ["CALL_HISTORY", "REPEAT", "check_call_history", "check_repeatability"]

# Seconds of calls at most, and bytes of results that are held meanwhile.
_SOAK_S = {"fast": 0.5, "standard": 10.0, "strict": 30.0}
# So many calls are made however slow they are, within `_LEAST_S`: on a busy machine half a second is
# 15 calls of a convolution, fewer than a ring of 16 or 64 buffers has.
_LEAST_CALLS, _LEAST_S = 100, 30.0
_HELD_BYTES = 256 << 20
_FEWER_OF_PROGRAMS = 30
_FLIPS = 4
# `numerics` asks how exact results are, on many more numbers; here a result need only belong to
# this input set and to no earlier one
_SLACK = 4.0
# by how much a single element moves: a cache may look at all, at some, or at roughly all
_STEPS_IN_RMS = (8.0, 1e-1, 1e-3)
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_REPEAT_BYTES = 8 << 30  # of outputs that `repeat` reads


def check_call_history(trial: Trial) -> list[CheckResult]:
    """No earlier call influences a result: other inputs, the same memory with new values, new
    memory with the same values, single elements changed, overwritten outputs, many calls, a fresh
    process.
    """
    first, _ = trial.first_two
    agreements: list[Agreement | None] = []
    for part in (
        _compare_alternated,
        _compare_at_same_address,
        _compare_at_new_address,
        _compare_single_elements,
        _compare_overwritten,
        _compare_after_many,
        _compare_with_fresh_process,
    ):
        # The rest would be asked of a candidate that is refused already.
        agreements += part(trial, first)
        if any(each is not None and each.problem for each in agreements):
            break
    return summarise("call_history", agreements, "eager refuses every further input set")


def _compare_result(trial: Trial, sample: InputSet, result: Result, question: str) -> Agreement:
    return compare_result(trial, sample, result, question, _SLACK)


def _compare_call(trial: Trial, sample: InputSet, question: str) -> Agreement | None:
    return compare_call(trial, sample, question, _SLACK)


def _compare_alternated(trial: Trial, first: InputSet) -> list[Agreement | None]:
    """A, B, A on a living instance; then inputs that a decision made on A would not fit."""
    other = trial.derive_sibling(first)
    agreements = [
        _compare_call(trial, sample, question)
        for sample, question in ((first, "A"), (other, "B after A"), (first, "A after B"))
    ]
    dissimilar: list[tuple[str, Callable[[], InputSet]]] = [
        ("negated", lambda: trial.derive(first, "negated", _map_inputs(trial, _make_scaler(-1.0)))),
        ("tiny", lambda: trial.derive(first, "tiny", _map_inputs(trial, _make_scaler(1e-3)))),
        ("shifted", lambda: trial.derive_sibling(first, "shifted")),
    ]
    # Not all of them fit into the time: which are left out is secret.
    for question, make in random.SystemRandom().sample(
        dissimilar, trial.count_affordable_sets(len(dissimilar))
    ):
        agreements.append(_compare_call(trial, make(), f"{question} inputs after A"))
    return agreements


def _compare_at_same_address(trial: Trial, first: InputSet) -> list[Agreement | None]:
    """New values at the addresses of A, then the old ones again."""
    other = trial.derive_sibling(first)
    # A cache of results by address holds those of A from here on.
    trial.run(first)
    new_values = [
        new if role == "input" else None
        for new, role in zip(other.inputs, trial.reference.roles, strict=True)
    ]
    old_values = [
        old if role == "input" else None
        for old, role in zip(first.inputs, trial.reference.roles, strict=True)
    ]
    # Same address, other values: a result kept by address is wrong now.
    trial.rewrite(first, new_values)
    agreements: list[Agreement | None] = [
        _compare_result(trial, other, trial.run(first), "same pointer, new data")
    ]
    # Later checks start from this set.
    trial.rewrite(first, old_values)
    return [
        *agreements,
        _compare_result(trial, first, trial.run(first), "same pointer, old data again"),
    ]


def _compare_at_new_address(trial: Trial, first: InputSet) -> list[Agreement | None]:
    moved = trial.derive(first, "new pointer", _map_inputs(trial, clone_strided))
    # The values are the same, so eager and float64 need not run again.
    moved.copy_expected(first)
    return [_compare_call(trial, moved, "new pointer, same data")]


def _compare_single_elements(trial: Trial, first: InputSet) -> list[Agreement | None]:
    """One element, the last or one drawn in secret, moves by much, by little, by very little;
    everything else is as before.
    """
    agreements: list[Agreement | None] = []
    for number in range(trial.count_affordable_sets(trial.profile.history * len(_STEPS_IN_RMS))):
        part = _STEPS_IN_RMS[number % len(_STEPS_IN_RMS)]
        changed = _change_one_element(
            trial, first, f"element {number}", last=number == 0, part=part
        )
        if changed is None:
            return agreements
        # Right before, so that a result kept of A is the latest.
        trial.run(first)
        agreements.append(_compare_call(trial, changed, f"one element moved by {part:g} rms"))
        trial.drop(changed)
        if agreements[-1] is not None and agreements[-1].problem:
            break
    return agreements


def _compare_overwritten(trial: Trial, first: InputSet) -> list[Agreement | None]:
    """The caller overwrites what it got: later results are its own."""
    trial.run(first, hold=True)
    # Writes into the outputs that the caller holds, which are the caller's to change.
    trial.child.call("scribble")
    again = trial.run(first)
    trial.child.call("drop", names=[])
    return [_compare_result(trial, first, again, "after the caller overwrote its outputs")]


def _compare_after_many(trial: Trial, first: InputSet) -> list[Agreement | None]:
    """Many calls, each of them right and its result still so when all are made; then inputs never
    seen before.
    """
    other, fresh = trial.derive_sibling(first), trial.derive_sibling(first, "normal", 1)
    agreements = [
        *_compare_each_of_many(trial, first, other),
        _compare_call(trial, fresh, "new inputs after many calls"),
    ]
    return list(agreements)


def _compare_each_of_many(trial: Trial, first: InputSet, other: InputSet) -> list[Agreement]:
    samples = [sample for sample in (first, other) if not eager_refuses(sample)]
    if not samples:
        return []
    budget_s = _SOAK_S[trial.profile.name]
    is_source = get_source_reference(trial) is not None
    # Both must be in the child: the calls are made there without messages between.
    trial.ensure_present(*samples)
    answer, flat = trial.fetch(
        "soak",
        sets=[sample.name for sample in samples],
        # A Program has no state that could change from call to call.
        calls=trial.profile.soak // (1 if is_source else _FEWER_OF_PROGRAMS),
        budget_s=budget_s,
        least=_LEAST_CALLS if is_source else 0,
        least_s=max(budget_s, _LEAST_S),
        held_bytes=_HELD_BYTES,
        deadline_s=budget_s + 600,
    )
    question = f"{answer['calls']} calls"
    agreements: list[Agreement] = []
    for sample, outputs in _split_outputs(answer, flat, samples):
        # Values alone: the form of results is `fresh_output`'s question.
        result = Result(outputs, sample.expected.facts, sample.expected.tree)
        agreements.append(_compare_result(trial, sample, result, question))
        if agreements[-1].problem:
            break
    return agreements


def _split_outputs(
    answer: Mapping[str, Any], flat: Outputs, samples: Sequence[InputSet]
) -> Iterator[tuple[InputSet, Outputs]]:
    """The outputs of calls, which came as one list, each with its input set. Raises
    CandidateFailure for an answer that does not fit.
    """
    # The answer comes from the process on trial.
    try:
        entries = [(int(number), int(width)) for number, width in answer["found"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CandidateFailure("soak", f"an unusable answer: {error}", "protocol") from error
    width = len(samples[0].expected.outputs)
    if len(flat) != width * len(entries) or any(
        each != width or not 0 <= number < len(samples) for number, each in entries
    ):
        raise CandidateFailure(
            "soak", f"results of {entries}, expected {width} tensors of each", "protocol"
        )
    for index, (number, _) in enumerate(entries):
        yield samples[number], flat[index * width : (index + 1) * width]


def _compare_with_fresh_process(trial: Trial, first: InputSet) -> list[Agreement | None]:
    """A process that has run nothing before agrees with this one, on inputs that differ from
    earlier ones in the last bit of one element too.
    """
    if trial.profile.processes < 2:
        return []
    other = trial.derive_sibling(first)
    flips = _draw_flips(trial, first)
    # The one-bit flips come after A, so a hash of parts of A would meet them as A.
    aged = [trial.run(sample).outputs for sample in (first, *flips)]
    with trial.open_in_new_process() as fresh:
        # The fresh process meets a flip first: it has no result of A to hand out.
        results = [fresh.run(fresh.hand_over(sample)) for sample in (*flips[:1], other, first)]
    agreements = [
        _compare_result(trial, sample, result, "in a fresh process")
        for sample, result in zip((other, first), results[-2:], strict=True)
    ]
    # Equal bits alone prove nothing: rounding may hide one bit of one element.
    stuck = flips and all(all_same_bits(outputs, aged[0]) for outputs in aged[1:])
    # A fresh process has other bits for the flip, and this one has those of A: a stored result was
    # handed out.
    if stuck and not all_same_bits(results[0].outputs, aged[0]):
        agreements.append(
            Agreement(
                "one bit of one element flipped",
                "the result is an earlier call's, a fresh process yields another",
            )
        )
    trial.drop(*flips)
    return list(agreements)


def _draw_flips(trial: Trial, first: InputSet) -> list[InputSet]:
    """Sets that differ from A in the last bit of one element, and for which eager's result has
    other bits.
    """
    samples: list[InputSet] = []
    for number in range(4 * _FLIPS):
        sample = _change_one_element(trial, first, f"flip {number}", last=False, part=0.0)
        if sample is None or len(samples) == _FLIPS:
            break
        # Where eager's result has the same bits a stored result would not show.
        if all_same_bits(sample.expected.outputs, first.expected.outputs):
            trial.drop(sample)
        else:
            samples.append(sample)
    return samples


def _change_one_element(
    trial: Trial, base: InputSet, question: str, *, last: bool, part: float
) -> InputSet | None:
    """A set that differs in one element of one floating plain input; None without such inputs."""
    chance = random.SystemRandom()
    positions = [
        i
        for i, t in enumerate(base.inputs)
        if trial.reference.roles[i] == "input" and t.dtype.is_floating_point and t.numel()
    ]
    if not positions:
        return None
    position = chance.choice(positions)

    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        copy = clone_strided(inputs[position])
        index = tuple(size - 1 if last else chance.randrange(size) for size in copy.shape)
        element = copy.as_strided(
            (1,), (1,), sum(i * s for i, s in zip(index, copy.stride(), strict=True))
        )
        # An input of zeros has no size to move by.
        if part:
            element += part * _compute_rms(copy) or part
        else:
            # The integer next to the bits is the next number in float: one unit in the last place.
            element.view(_BITS[copy.element_size()]).add_(1)
        return [copy if i == position else None for i in range(len(inputs))]

    return trial.derive(base, question, make)


def _compute_rms(tensor: torch.Tensor) -> float:
    """Without a copy of the whole in another type."""
    # Squares of float16 overflow above 255.
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return float(vector_norm(tensor, dtype=wide)) / math.sqrt(tensor.numel())


def _map_inputs(
    trial: Trial, make: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., list[torch.Tensor | None]]:
    def replace_inputs(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [
            make(t) if role == "input" else None
            for t, role in zip(inputs, trial.reference.roles, strict=True)
        ]

    return replace_inputs


def _make_scaler(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def scale(tensor: torch.Tensor) -> torch.Tensor:
        copy = clone_strided(tensor)
        if copy.dtype.is_floating_point:
            # Whole memory, so that elements which share it are scaled once.
            copy.as_strided((storage_extent(copy.shape, copy.stride()),), (1,)).mul_(factor)
        return copy

    return scale


def check_repeatability(trial: Trial) -> list[CheckResult]:
    """The same inputs give the same bits, run after run; a candidate may vary only where eager
    does.
    """
    first, _ = trial.first_two
    size = sum(t.numel() * t.element_size() for t in first.expected.outputs if t is not None)
    runs = max(3, min(trial.profile.repeats, _MAX_REPEAT_BYTES // max(size, 1)))
    first_outputs = trial.run(first).outputs
    different = sum(
        not all_same_bits(first_outputs, trial.run(first).outputs) for _ in range(runs - 1)
    )
    if not different:
        return [CheckResult("repeat", True, 0.0, 0.0, f"{runs} runs, equal bits")]
    # Asked only of a candidate that varies: eager's runs cost as much.
    eager_runs = [trial.reference.eager(first.inputs).outputs for _ in range(4)]
    varies = any(not all_same_bits(first.expected.outputs, other) for other in eager_runs)
    detail = (
        f"bits differ in {different} of {runs - 1} runs, eager's do {'too' if varies else 'not'}"
    )
    return [CheckResult("repeat", varies, float(different), 0.0, detail)]


CALL_HISTORY = CheckSpec(
    name="call_history",
    run=check_call_history,
    failure="hack",
    knobs=("history", "soak", "processes", "budget_s"),
    asks=(
        "is an answer the same whatever was asked before, at the same address or another, "
        "after one element changed, after many calls and in each of them"
    ),
)
REPEAT = CheckSpec(
    name="repeat",
    run=check_repeatability,
    knobs=("repeats",),
    asks="equal bits in every run, unless eager's differ too",
)
