"""Check `special`: NaN, infinities, signed zeros, ties, the ends of the half types,
denormals, values just above one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.ir.schedule import INDUCTOR
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_result,
    disagree_on_error,
    eager_refuses,
    get_source_reference,
)
from torch_cudal1.judge.checks.finite_values import compare_finite_elements
from torch_cudal1.judge.checks.rounding import draw_uniform, is_decided_by_rounding
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.compare import mask_mismatches, same_masks
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure, Result
from torch_cudal1.judge.reference.source_reference import SourceReference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.channel import storage_extent

__all__ = ["SPECIAL", "check_special_values", "iter_infinite_variants"]

_MAX_SPECIAL_INPUTS = 6
_LARGE_WEIGHT = 1024.0
# Of the sets that stay until the end. Counted with what they share, which is not copied.
_MAX_KEPT_BYTES = 1 << 30
_TINY = {torch.float16: 1e-6, torch.float64: 1e-310}  # denormals; 1e-40 in float32 and bfloat16
# of the infinities: numbers so near zero that rounding decides their sign
_MAX_TURNED_FRACTION = 1e-5
# of the result's size: rounding a denormal loses less, flushing it loses all
_FLUSHED_FRACTION = 0.25
Fill = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_special_values(trial: Trial) -> list[CheckResult]:
    """One NaN, one infinity, in each floating input in turn: they must reach what they reach in
    eager. Then whole inputs of values that fast arithmetic gets wrong.
    """
    if trial.contract.assume_finite:
        return [
            CheckResult(
                "special",
                True,
                detail="not tested: the user promised finite values (assume_finite)",
            )
        ]
    sample, _ = trial.first_two
    positions = _draw_positions(trial, sample)
    if not positions:
        return [CheckResult("special", True, detail="not applicable: no floating input")]
    checks: list[CheckResult] = []
    values = (
        ("NaN", float("nan")),
        ("infinity", float("inf")),
        ("negative infinity", -float("inf")),
    )
    variants: list[InputSet] = []
    try:
        for kind, value in values if trial.profile.all_specials else values[:2]:
            for position in positions:
                name, held = _choose_value(trial, position, kind, value)
                variant = _make_variant(trial, sample, position, name, held)
                variants.append(variant)
                outputs = trial.run(variant).outputs
                failed = _find_mask_difference(trial, variant, outputs) or _find_wrong_number(
                    trial, variant, outputs
                )
                if failed:
                    failed = f"one {name} in input {position}{failed}"
                    return [*checks, CheckResult("special", False, detail=failed)]
                # In memory of its own each, where there is room: what a candidate remembers of an
                # address is a question of `call_history`.
                if sum(map(_count_bytes, variants)) > _MAX_KEPT_BYTES:
                    trial.drop(variants.pop(0))
            checks.append(
                CheckResult("special", True, detail=f"one {kind} in each of inputs {positions}")
            )
    finally:
        for variant in variants:
            trial.drop(variant)
    return [*checks, *_check_whole_inputs(trial, sample)] if trial.profile.all_specials else checks


def _choose_value(trial: Trial, position: int, kind: str, value: float) -> tuple[str, float]:
    """What an input holds, and its name. Infinite weights serve nobody, and honest modules fold one
    weight into another, where an infinity times zero is NaN in another place: they are large.
    """
    if trial.reference.roles[position] == "input" or math.isnan(value):
        return kind, value
    return "large number", math.copysign(_LARGE_WEIGHT, value)


def _count_bytes(sample: InputSet) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in sample.inputs)


def iter_infinite_variants(trial: Trial, sample: InputSet) -> Generator[InputSet]:
    """`sample` with an infinity in each of some floating inputs in turn, as `special` takes it;
    each is dropped after use.
    """
    for position in _draw_positions(trial, sample):
        variant = _make_variant(trial, sample, position, "infinity", float("inf"))
        try:
            yield variant
        # Also when the consumer stops early: each set holds memory in the child.
        finally:
            trial.drop(variant)


def _make_variant(
    trial: Trial, sample: InputSet, position: int, kind: str, value: float
) -> InputSet:
    # A source can hide what it does with a negative infinity. A set of its own is one more chance to
    # remember another by its address, and only where everything is asked worth that.
    has_both = (
        value == math.inf
        and not trial.profile.all_specials
        and get_source_reference(trial) is not None
    )
    make = partial(_replace_in_input, position, (value, -value) if has_both else (value,))
    return trial.derive(sample, f"{kind} in input {position}", make)


def _draw_positions(trial: Trial, sample: InputSet) -> list[int]:
    """Floating inputs, those that are no parameters first, at most six; which of many is a secret."""
    floating = [i for i, t in enumerate(sample.inputs) if t.dtype.is_floating_point and t.numel()]
    drawn = random.SystemRandom().sample(floating, len(floating))
    # Inputs change with every call, parameters seldom.
    return sorted(
        sorted(drawn, key=lambda i: trial.reference.roles[i] != "input")[:_MAX_SPECIAL_INPUTS]
    )


def _replace_in_input(
    position: int, values: Sequence[float], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    return [
        _copy_with_values(tensor, values) if i == position else None
        for i, tensor in enumerate(inputs)
    ]


def _copy_with_values(tensor: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """A copy with each value at an element of its own; with fewer where there are fewer elements."""
    copy = clone_strided(tensor)
    # Which elements is secret: a kernel may look at some only.
    index = [random.SystemRandom().randrange(size) for size in tensor.shape]
    # The next one lies elsewhere along the first dimension that there is: most often another row.
    dim = next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
    for value in values[: None if dim is not None else 1]:
        place = sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        copy.as_strided((1,), (1,), place).fill_(value)
        if dim is not None:
            index[dim] = (index[dim] + 1) % tensor.shape[dim]
    return copy


def _find_mask_difference(trial: Trial, sample: InputSet, outputs: Outputs) -> str:
    """Where NaN and infinities of a result lie otherwise than in eager, "" if nowhere. Each of
    PyTorch's own ways to compute the output is a witness, and agreement with one is enough.
    """
    # The cheap witness first, and each further one only where the output differs from all before.
    for position, (out, expected) in enumerate(zip(outputs, sample.expected.outputs, strict=True)):
        if out is None or expected is None or same_masks(out, [expected]).passed:
            continue
        witnesses = [expected]
        # eager's algorithm may spread a NaN where float64 does not
        exact = sample.get_exact(position)
        comparison = same_masks(out, witnesses, exact)
        if (
            not comparison.passed
            # The algorithm that cuDNN chooses decides whether products with padding zeros are
            # formed at all: infinity times zero is NaN.
            and (native := _run_without_cudnn(trial, sample, position)) is not None
        ):
            witnesses.append(native)
            comparison = same_masks(out, witnesses, exact)
        if (
            not comparison.passed
            # Inductor lowers some operators to formulas that treat infinities differently from
            # eager's kernels.
            and (compiled := _run_by_inductor(trial, sample, position)) is not None
        ):
            witnesses.append(compiled)
            comparison = same_masks(out, witnesses, exact)
        if comparison.passed or _differs_in_signs_only(out, witnesses, exact):
            continue
        if not is_decided_by_rounding(
            trial, sample, position, mask_mismatches(out, witnesses, exact)
        ):
            return f"; output {position}: {comparison.detail}"
    return ""


def _find_wrong_number(trial: Trial, sample: InputSet, outputs: Outputs) -> str:
    """The first output that is wrong in its finite elements, "" if none is."""
    for position, out in enumerate(outputs):
        if out is None or sample.expected.outputs[position] is None:
            continue
        comparison = compare_finite_elements(trial, sample, position, out)
        if not comparison.passed:
            return f"; output {position}, finite elements: {comparison.detail or 'differ'}"
    return ""


def _run_by_inductor(trial: Trial, sample: InputSet, position: int) -> torch.Tensor | None:
    """One output as torch.compile computes it, None where it cannot."""
    if isinstance(trial.reference, SourceReference):
        try:
            return (
                trial.reference.in_way(replace(trial.reference.way, compiled="default"))
                .eager(sample.inputs)
                .outputs[position]
            )
        except ReferenceFailure:
            return None
    # In the candidate's process: a Program runs no Python and so cannot change what Inductor does
    # there. A source could, so its reference runs in the oracle above.
    schedule = trial.candidate.schedule
    try:
        return trial.run_reference_in_child(
            schedule if schedule.base == "inductor" else INDUCTOR, sample
        )[position]
    except CandidateFailure:
        if not trial.child.usable:
            raise
        return None


def _differs_in_signs_only(
    out: torch.Tensor, witnesses: Sequence[torch.Tensor], exact: torch.Tensor | None
) -> bool:
    """Whether all that differs are signs of infinities, no more often than between right
    evaluations.
    """
    eager = witnesses[0]
    # An infinity of the other sign, and nothing else.
    turned = out.isinf() & (out == -eager)
    if not same_masks(torch.where(turned, eager, out), witnesses, exact).passed:
        return False
    by_rounding = (
        0 if exact is None else max(int((w.isinf() & (w == -exact)).sum()) for w in witnesses)
    )
    # An infinite scale makes an infinity of a number that rounding leaves on one side of zero or
    # the other.
    return int(turned.sum()) <= 2 * by_rounding + _MAX_TURNED_FRACTION * int(eager.isinf().sum())


def _run_without_cudnn(trial: Trial, sample: InputSet, position: int) -> torch.Tensor | None:
    """One output of eager in kernels of PyTorch's own, None where there is no such kernel or
    no memory for it.
    """
    if trial.device.type != "cuda" or not torch.backends.cudnn.enabled:
        return None
    # The flag is the process's own: `finally` sets it back whatever happens.
    # PyTorch's own transposed convolution adds up only taps that exist, where cuDNN may multiply
    # padding.
    torch.backends.cudnn.enabled = False
    try:
        return sample.eager(sample.inputs).outputs[position]
    except ReferenceFailure:  # more memory than there is, or no such kernel
        return None
    finally:
        torch.backends.cudnn.enabled = True


def _check_whole_inputs(trial: Trial, base: InputSet) -> Iterator[CheckResult]:
    for kind, fill, judge in _FILLS:
        sample = trial.derive(base, kind, partial(_fill_inputs, trial, fill))
        # What eager refuses is asked of no candidate.
        if eager_refuses(sample):
            continue
        agreement = disagree_on_error(trial, kind, partial(_judge_call, trial, sample, kind, judge))
        trial.drop(sample)
        yield CheckResult(
            "special",
            not agreement.problem,
            agreement.ratio,
            agreement.limit,
            f"{kind}: {agreement.problem}" if agreement.problem else kind,
        )
        # The rest would be asked of a candidate that is refused already.
        if agreement.problem:
            return


def _judge_call(
    trial: Trial,
    sample: InputSet,
    question: str,
    judge: Callable[[Trial, InputSet, Result, str], Agreement],
) -> Agreement:
    return judge(trial, sample, trial.run(sample), question)


def _fill_inputs(
    trial: Trial, fill: Fill, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    values: list[torch.Tensor | None] = []
    for tensor, role in zip(inputs, trial.reference.roles, strict=True):
        if role != "input" or not tensor.dtype.is_floating_point:
            values.append(None)
            continue
        copy = clone_strided(tensor)
        flat = copy.as_strided((storage_extent(copy.shape, copy.stride()),), (1,))
        # The whole memory, so that elements which share it stay one.
        flat.copy_(fill(flat, draw_uniform(flat, torch.float32)))
        values.append(copy)
    return values


def _compare_floats(trial: Trial, sample: InputSet, result: Result, question: str) -> Agreement:
    """PyTorch promises no index among equal values, so indices are left out."""
    outputs: Outputs = [
        eager
        if actual is not None and eager is not None and not eager.dtype.is_floating_point
        else actual
        for actual, eager in zip(result.outputs, sample.expected.outputs, strict=True)
    ]
    return compare_result(trial, sample, Result(outputs, result.facts, result.tree), question)


def _compare_denormals(trial: Trial, sample: InputSet, result: Result, question: str) -> Agreement:
    """Denormals have few digits, so only losing them counts."""
    worst = 0.0
    for position, (actual, eager) in enumerate(
        zip(result.outputs, sample.expected.outputs, strict=True)
    ):
        exact = sample.get_exact(position)
        if (
            actual is None
            or eager is None
            or exact is None
            or not eager.dtype.is_floating_point
            or not eager.numel()
        ):
            continue
        # squares of denormals vanish even in float64
        peak = float(exact.abs().nan_to_num(0.0, 0.0, 0.0).max()) or 1.0
        eager_error, error, size = (
            _compute_rms(t, peak) for t in (eager.double() - exact, actual.double() - exact, exact)
        )
        # Eager may flush denormals itself, by flags or by kernels: then a candidate may too.
        limit = max(4 * eager_error, _FLUSHED_FRACTION * size)
        if error > limit:
            return Agreement(
                question,
                f"output {position} is off by {error / size if size else error:.2g} of itself",
                error,
                limit,
            )
        worst = max(worst, error / limit if limit else 0.0)
    return Agreement(question, "", worst, 1.0)


def _compute_rms(values: torch.Tensor, peak: float) -> float:
    # Relative to the peak: squares of denormals are zero even in float64.
    finite = values[values.isfinite()] / peak
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _compare_zero_signs(trial: Trial, sample: InputSet, result: Result, question: str) -> Agreement:
    """Signs of zeros, where eager hands values of its inputs on: copies, gathers."""
    input_values = torch.cat(
        [t.reshape(-1).double() for t in sample.inputs if t.dtype.is_floating_point]
    )
    agreement = compare_result(trial, sample, result, question)
    for position, (actual, eager) in enumerate(
        zip(result.outputs, sample.expected.outputs, strict=True)
    ):
        # Where eager computes, the sign of a zero is an accident of rounding.
        if (
            agreement.problem
            or actual is None
            or eager is None
            or not eager.dtype.is_floating_point
            or not _is_copied(input_values, eager)
        ):
            continue
        wrong = int(((eager == 0) & (actual.signbit() != eager.signbit())).sum())
        if wrong:
            return Agreement(
                question, f"output {position}: {wrong} zeros have the other sign", float(wrong), 0.0
            )
    return agreement


def _is_copied(input_values: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether every value of a result is a value of the inputs; zeros alone prove nothing."""
    other = result[result != 0].double()
    return other.numel() > 0 and bool(torch.isin(other, input_values).all())


def _fill_beyond_half(flat: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """65,504 to 70,000 with a random sign; float16 itself ends where this begins."""
    # float16 has nothing beyond 65,504.
    top = 65_504.0 if flat.dtype == torch.float16 else 65_504.0 + 4_496.0 * chance
    return torch.where(flat < 0, -1.0, 1.0) * top


_FILLS: tuple[tuple[str, Fill, Callable[[Trial, InputSet, Result, str], Agreement]], ...] = (
    ("ties", lambda flat, chance: flat.round(), _compare_floats),
    (
        "negative zeros",
        lambda flat, chance: torch.where(chance < 0.5, -0.0 * torch.ones_like(flat), flat),
        _compare_zero_signs,
    ),
    ("values around 65,504 to 70,000", _fill_beyond_half, compare_result),
    ("1 + k / 4096", lambda flat, chance: 1 + (chance * 8).floor() / 4_096, compare_result),
    ("denormals", lambda flat, chance: flat * _TINY.get(flat.dtype, 1e-40), _compare_denormals),
)


SPECIAL = CheckSpec(
    name="special",
    run=check_special_values,
    knobs=("all_specials",),
    asks=(
        "NaN, infinities (a large number in weights), and at `standard` signed zeros, ties, extremes: they go where eager "
        "or Inductor sends them, and what is finite is right; few places excepted where rounding alone decides and "
        "eager's own change when its inputs move by little more than that"
    ),
)
