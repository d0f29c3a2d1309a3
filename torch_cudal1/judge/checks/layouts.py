"""Checks of form: other shapes, memory layouts and types of the plain inputs than the examples
have.

A source has no guard, so it must take every form that the reference takes. A Program is guarded:
its shapes, strides and types are part of its region, and everything else reaches the baseline.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    Attempt,
    compare_result,
    disagree_on_error,
    eager_refuses,
    eager_repeats,
    get_source_reference,
    report_not_applicable,
    summarise,
    tolerate_error,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.input_cache import count_tensor_bytes
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.limits import read_free_bytes
from torch_cudal1.judge.wire.call_spec import RunMode

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "SHAPES",
    "check_dtypes",
    "check_layouts",
    "check_shapes",
    "list_shapes",
]

# Unknown to every candidate: by it sizes are drawn, the same for all candidates of a reference.
_SECRET = secrets.token_hex(16)
_TILES = (16, 32, 64, 128)
_DTYPES = ("float16", "bfloat16", "float64")
# small forms have few elements, so both errors are estimates; coarser arithmetic is off by a
# hundred times and more. Rows of an expanded input are equal, so the rounding of a product adds up
# in one direction: of 3,000 sums of 64 terms in another order the furthest took 2.5.
_SLACK, _SLACK_OF_EQUAL_ROWS = 1.5, 4.0
# Of inputs and outputs: in both processes, on their way between them, and in float64.
_COPIES = 8
# Of the memory that is free.
_MEMORY_SHARE = 0.25
# Of a form that is so much larger than the examples', but at `strict`.
_MOST_GROWTH, _MOST_GROWN_BYTES = 1.5, 1 << 30
_GUARDED = "shapes, strides and types of a Program are guarded: others reach the baseline"
Specs = tuple[TensorSpec, ...]


def check_shapes(trial: Trial) -> list[CheckResult]:
    """Other sizes of the first dimension, then of the others: odd, prime, around a tile, one, half,
    none.
    """
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable("shapes", _GUARDED)
    agreements: list[Agreement | None] = []
    for question, specs in list_shapes(reference, trial.profile.name == "strict"):
        # Sizes that eager refuses cost little and do not count.
        if sum(each is not None for each in agreements) == trial.count_affordable_sets(
            trial.profile.shapes, 0.2
        ):
            break
        size_bytes, most_bytes = _estimate_bytes(trial, specs), _limit_bytes(trial, specs)
        if size_bytes > most_bytes:
            note = f"{question} left out, as it may take {size_bytes / (1 << 30):.1f} GiB"
            agreements.append(Agreement(note))
            continue
        # In turn from the usual sizes to others and back, and the other way round: what a module
        # keeps of some must not serve others.
        compare = partial(
            _compare_around, trial, reference.with_specs(specs), question, len(agreements) % 2 == 0
        )
        agreements.append(_ask_in_form(trial, reference.with_specs(specs), question, compare))
        if (each := agreements[-1]) is not None and each.problem:
            break
    return summarise(
        "shapes", agreements, "eager takes no other shape, or no plain input has a dimension"
    )


def _limit_bytes(trial: Trial, specs: Specs) -> float:
    """What the tensors of an evaluation in this form may take."""
    free_bytes = read_free_bytes(trial.device)
    most_bytes = _MEMORY_SHARE * free_bytes if free_bytes else math.inf
    # What a call makes in between is unknown, and may grow with the square.
    before, after = (
        _count_plain_bytes(trial, trial.reference.specs),
        _count_plain_bytes(trial, specs),
    )
    if trial.profile.name != "strict" and after > _MOST_GROWTH * before:
        return min(most_bytes, _MOST_GROWN_BYTES)
    return most_bytes


def _count_plain_bytes(trial: Trial, specs: Specs) -> int:
    pairs = zip(specs, trial.reference.roles, strict=True)
    return sum(spec.size_bytes for spec, role in pairs if role == "input")


def _estimate_bytes(trial: Trial, specs: Specs) -> float:
    """What the tensors of an evaluation in this form take, from what those of the examples take."""
    before, after = (
        _count_plain_bytes(trial, trial.reference.specs),
        _count_plain_bytes(trial, specs),
    )
    outputs = count_tensor_bytes(
        out for out in trial.first_two[0].expected.outputs if out is not None
    )
    return _COPIES * (after + outputs * after / max(1, before))


def list_shapes(reference: SourceReference, huge: bool = False) -> Iterator[tuple[str, Specs]]:
    """Other sizes of the plain inputs, the most telling ones first, whether eager takes them or not.
    `huge`: a batch of 65,537 too.
    """
    plain = [
        spec
        for spec, role in zip(reference.specs, reference.roles, strict=True)
        if role == "input" and spec.shape
    ]
    if not plain:
        return
    chance = random.Random(f"{_SECRET} {reference.key}")
    batch = plain[0].shape[0]
    batch_sizes = _list_sizes(batch, _draw_larger(batch, chance), huge)
    sizes_of_dimension = []
    for dim in range(1, max(len(spec.shape) for spec in plain)):
        old = next(spec.shape[dim] for spec in plain if len(spec.shape) > dim)
        # One more leaves a tail behind the last whole tile, one less makes the last tile short.
        sizes = [old + 1, _draw_larger(old, chance), old - 1, max(1, old // 2)]
        sizes_of_dimension.append((dim, old, [size for size in sizes if size not in (0, old)]))
    # Which of several dimensions a profile has no time for is secret.
    chance.shuffle(sizes_of_dimension)
    # In turn, and two of a batch, which nearly every module takes in any size.
    for turn in range(max([len(batch_sizes), *(len(sizes) for _, _, sizes in sizes_of_dimension)])):
        for size in batch_sizes[2 * turn : 2 * turn + 2]:
            yield f"batch {size}", _resize(reference, 0, batch, size)
        for dim, old, sizes in sizes_of_dimension:
            for size in sizes[turn : turn + 1]:
                yield f"dimension {dim} of {size}", _resize(reference, dim, old, size)


def _draw_larger(size: int, chance: random.Random) -> int:
    """From twice to three times as many: room for somewhat more than the examples is no answer."""
    return 2 * size + chance.randrange(size + 1)


def _list_sizes(batch: int, larger: int, huge: bool) -> list[int]:
    """In the order in which they are most telling. The first is no multiple of any tile; 65,537
    passes the limit of a grid.
    """
    tile = next((t for t in reversed(_TILES) if t <= batch), 16)
    sizes = [
        # No multiple of any tile, so every kernel has a tail.
        batch + 1,
        1,
        larger,
        # A prime has no divisor that a kernel could use for its blocks.
        _prime_below(batch),
        max(1, batch // 2),
        tile + 1,
        tile - 1,
        0,
    ]
    # A grid has at most 65,535 blocks in its second and third dimension.
    return [size for size in dict.fromkeys([*sizes, *([65_537] if huge else [])]) if size != batch]


def _prime_below(number: int) -> int:
    return next(
        (
            n
            for n in range(max(number - 1, 2), 1, -1)
            if all(n % d for d in range(2, int(n**0.5) + 1))
        ),
        2,
    )


def _resize(reference: SourceReference, dim: int, old: int, new: int) -> Specs:
    """Every plain input that has this size there gets the new one."""

    def resize_spec(spec: TensorSpec, role: str) -> TensorSpec:
        if role != "input" or len(spec.shape) <= dim or spec.shape[dim] != old:
            return spec
        return _make_contiguous_spec(
            spec, tuple(new if i == dim else size for i, size in enumerate(spec.shape))
        )

    return tuple(
        resize_spec(spec, role) for spec, role in zip(reference.specs, reference.roles, strict=True)
    )


def _make_contiguous_spec(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    # The meta device gives the strides without memory.
    return TensorSpec(spec.dtype, shape, torch.empty(shape, device="meta").stride(), spec.device)


def _ask_in_form(
    trial: Trial,
    reference: SourceReference,
    question: str,
    compare: Callable[[], Agreement],
    ask: Attempt = disagree_on_error,
) -> Agreement | None:
    """The candidate against the reference in another form; None where the reference refuses it."""
    try:
        # Asking for the form of the results calls the reference: where it raises the form is not
        # taken.
        if not any(reference.outputs):
            return None
    except ReferenceFailure:
        return None
    return ask(trial, question, compare)


def _compare_in_form(trial: Trial, reference: SourceReference, question: str) -> Agreement:
    aside = trial.load_in_slot(reference, f"candidate {reference.key[:8]}")
    sample = aside.draw("normal")
    if eager_refuses(sample):
        return Agreement(question)
    slack = _SLACK_OF_EQUAL_ROWS if question == "expanded" else _SLACK
    agreement = compare_result(aside, sample, aside.run(sample), question, slack)
    # Each form has results of its own, which no later check reads.
    aside.free_memory_if_short()
    aside.drop(sample)
    return agreement


def _compare_around(
    trial: Trial, reference: SourceReference, question: str, usual_first: bool
) -> Agreement:
    """One instance in the usual form, in another, and in the usual one; or the other way round."""
    usual = trial.first_two[0]
    aside = trial.load_in_slot(reference, f"candidate {reference.key[:8]}")
    aside.samples[usual.name] = usual
    # In the child before what is derived of it: both share the state of one instance.
    aside.ensure_present(usual)
    sample = _derive_in_form(aside, usual)
    if eager_refuses(sample):
        return Agreement(question)
    turns = (usual, sample, usual) if usual_first else (sample, usual, sample)
    agreement = Agreement(question)
    for number, turn in enumerate(turns):
        result = aside.run(turn)
        # The usual form alone was asked before.
        if turn is usual and not number:
            continue
        where = question if turn is sample else f"the usual sizes after {question}"
        each = compare_result(aside, turn, result, where, _SLACK)
        if each.problem and (turn is sample or eager_repeats(reference, turns)):
            agreement = each
            break
        if turn is sample:
            agreement = each
    # Each form has results of its own, which no later check reads.
    aside.free_memory_if_short()
    aside.drop(sample)
    return agreement


def _derive_in_form(aside: Trial, usual: InputSet) -> InputSet:
    """A set in the form of `aside` with the parameters and buffers of `usual`, so for the same
    instance.
    """
    drawn = aside.draw("normal")
    sample = aside.derive(
        usual,
        f"after {usual.name}",
        lambda _: [
            new if role == "input" else None
            for new, role in zip(drawn.inputs, aside.reference.roles, strict=True)
        ],
    )
    aside.drop(drawn)
    return sample


def check_layouts(trial: Trial) -> list[CheckResult]:
    """Otherwise in memory: transposed, channels last, every second element, one element further,
    expanded, one tensor twice.

    An error is an honest answer: no caller gets a wrong number, and where it runs the strides are
    in the key and the guard.
    """
    reference = get_source_reference(trial)
    agreements: list[Agreement | None] = []
    limit = trial.profile.layouts
    if reference is not None:
        for question, specs in _list_layouts(reference):
            if sum(each is not None for each in agreements) >= limit:
                break
            # An error is an honest answer here: no caller gets a wrong number from it.
            agreements.append(
                _ask_in_form(
                    trial,
                    other := reference.with_specs(specs),
                    question,
                    partial(_compare_in_form, trial, other, question),
                    tolerate_error,
                )
            )
            if (each := agreements[-1]) is not None and each.problem:
                return summarise("layouts", agreements, "")
    agreements += (
        # Unlike strides, these two can only be arranged in the child's memory.
        [_compare_placed(trial, question) for question in ("offset 1", "same tensor twice")]
        if limit > len(_STRIDE_CHANGES)
        else []
    )
    if reference is None:
        return report_not_applicable("layouts", _GUARDED + ", and so are alignment and overlap")
    return summarise("layouts", agreements, "no plain input has two dimensions")


def _list_layouts(reference: SourceReference) -> Iterator[tuple[str, Specs]]:
    for question, change in _STRIDE_CHANGES.items():
        specs = tuple(
            replace(spec, strides=change(spec.shape, spec.strides)) if role == "input" else spec
            for spec, role in zip(reference.specs, reference.roles, strict=True)
        )
        # A change that leaves all strides as they were asks nothing new.
        if specs != reference.specs:
            yield question, specs


Strides = tuple[int, ...]


def _transpose_strides(shape: Sequence[int], strides: Strides) -> Strides:
    """The last two dimensions in the other order in memory."""
    if len(shape) < 2:
        return strides
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    return _make_dense_strides(shape, order)


def _make_channels_last_strides(shape: Sequence[int], strides: Strides) -> Strides:
    return (
        _make_dense_strides(shape, [0, *range(2, len(shape)), 1])
        if len(shape) in (4, 5)
        else strides
    )


def _step_two_strides(shape: Sequence[int], strides: Strides) -> Strides:
    # Every second element of a tensor twice as large.
    return (
        tuple(2 * stride for stride in _make_dense_strides(shape, range(len(shape))))
        if shape
        else strides
    )


def _expand_strides(shape: Sequence[int], strides: Strides) -> Strides:
    return (
        # The first dimension has stride 0, as `expand` makes it.
        (0, *_make_dense_strides(shape[1:], range(len(shape) - 1)))
        if len(shape) > 1 and shape[0] > 1
        else strides
    )


_STRIDE_CHANGES: dict[str, Callable[[Sequence[int], Strides], Strides]] = {
    "transposed": _transpose_strides,
    "step 2": _step_two_strides,
    "channels_last": _make_channels_last_strides,
    "expanded": _expand_strides,
}


def _make_dense_strides(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Dense strides with the dimensions from outermost to innermost in `order`."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _compare_placed(trial: Trial, question: str) -> Agreement | None:
    """Where the tensors of a call may lie besides their strides."""
    first, _ = trial.first_two
    plain = [i for i, role in enumerate(trial.reference.roles) if role == "input"]
    if get_source_reference(trial) is None or not plain:
        return None
    same = [
        (i, j)
        for i in plain
        for j in plain
        if i < j and trial.reference.specs[i] == trial.reference.specs[j]
    ][:1]
    if question == "same tensor twice" and not same:
        return None

    def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values = list(inputs)
        for source, target in same if question == "same tensor twice" else ():
            values[target] = values[source]
        # Each in memory of its own first; the child then moves them.
        return [value.clone() if i in plain else None for i, value in enumerate(values)]

    sample = trial.derive(first, question, make)
    if eager_refuses(sample):
        return None
    trial.child.call(
        "arrange",
        name=sample.name,
        offset=plain if question == "offset 1" else [],
        same=same if question != "offset 1" else [],
    )

    def ask() -> Agreement:
        return compare_result(trial, sample, trial.run(sample), question)

    return tolerate_error(trial, question, ask)


def check_dtypes(trial: Trial) -> list[CheckResult]:
    """The module cast after a first call and called with inputs of that type: half types and
    float64, where eager takes them.
    """
    reference = get_source_reference(trial)
    if reference is None:
        return report_not_applicable("dtypes", _GUARDED)
    agreements: list[Agreement | None] = []
    for name in _DTYPES[: trial.profile.dtypes]:
        specs = tuple(_cast(spec, name) for spec in reference.specs)
        if specs == reference.specs:
            # The reference has that type already.
            continue
        other = reference.in_way(RunMode(dtype=name)).with_specs(specs)
        agreements.append(
            _ask_in_form(trial, other, name, partial(_compare_in_form, trial, other, name))
        )
        if (each := agreements[-1]) is not None and each.problem:
            break
    return summarise("dtypes", agreements, "no floating tensor, or eager takes no other type")


def _cast(spec: TensorSpec, name: str) -> TensorSpec:
    return replace(spec, dtype=name) if spec.torch_dtype.is_floating_point else spec


SHAPES = CheckSpec(
    name="shapes",
    run=check_shapes,
    knobs=("shapes", "budget_s"),
    replaces_only=True,
    asks=(
        "other sizes of each dimension in turn, as many as the profile has time for: one more, one, "
        "two to three times as many (of small inputs), primes, half, around a tile, none"
    ),
)
LAYOUTS = CheckSpec(
    name="layouts",
    run=check_layouts,
    knobs=("layouts",),
    replaces_only=True,
    asks=(
        "the same values otherwise in memory: transposed, channels last, with steps, expanded, at "
        "`standard` with an offset and one tensor twice; an error is an answer there, and is told"
    ),
)
DTYPES = CheckSpec(
    name="dtypes",
    run=check_dtypes,
    since="standard",
    knobs=("dtypes",),
    replaces_only=True,
    asks="cast to the other floating types that eager takes",
)
