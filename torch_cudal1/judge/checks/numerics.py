"""Detector of wrong values: the candidate against eager and float64 on many secret input sets."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from torch_cudal1.device.gpu_memory import kept_bytes
from torch_cudal1.ir.records import Check
from torch_cudal1.judge.reference.compare import (
    EAGERS_OWN,
    Comparison,
    compare,
    proven_ties,
    same_bits,
    same_numbers,
)
from torch_cudal1.judge.reference.float64 import Infeasible
from torch_cudal1.judge.reference.input_cache import own_bytes
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.region_reference import Outputs, RegionSubject
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["compared", "first_two", "numerics"]

_HEAVY_FLOPS = 2e11  # on the CPU a float64 run of this takes seconds
_HEAVY_BYTES = 4 << 30
_KEPT_SETS = 3  # of a distribution stay for the detectors that follow
_NEEDED = 2  # which the detectors that follow need, see `first_two`
_COUNTED = 64
_HALF = ("float16", "bfloat16")


def numerics(trial: Trial) -> list[Check]:
    """The criterion of `compare` on secret inputs, the candidate before the reference; one check
    per distribution.
    """
    found: dict[str, list[Check]] = {}
    evidence: set[int] = set()
    for distribution in _distributions(trial):
        sample = trial.draw(distribution)
        result = trial.run(sample)
        blind = [i for i, there in enumerate(trial.subject.outputs) if there and i not in evidence]
        comparisons = list(compared(trial, sample, result.outputs, weighed=blind))
        evidence |= {position for position, comparison in comparisons if not comparison.void}
        found.setdefault(distribution, []).append(_numeric_check(sample, comparisons))
        sample.forget_exact()
        if not found[distribution][-1].passed:
            return [*_summed(found), found[distribution][-1]]
        large = own_bytes(sample.inputs) > kept_bytes(trial.device.type)
        if len(found[distribution]) <= _KEPT_SETS and (len(found) <= _NEEDED or not large):
            trial.results[sample.name] = replace(
                result, outputs=[]
            )  # its form, which `fresh_output` asks for
        else:
            trial.drop(sample)
        del result, comparisons
        trial.forget()
    blind = [i for i, there in enumerate(trial.subject.outputs) if there and i not in evidence]
    if blind:
        why = Check(
            "numerics", False, detail=f"no input set leaves digits to compare in output {blind[0]}"
        )
        return [*_summed(found), why]
    return _summed(found)


def _summed(found: Mapping[str, list[Check]]) -> list[Check]:
    """One check per distribution: the worst ratio of its sets."""
    worst = [
        max((c for c in checks if c.passed), key=lambda c: c.value or 0.0, default=None)
        for checks in found.values()
    ]
    counts = [len(checks) for checks in found.values()]
    return [
        check if count == 1 else replace(check, detail=f"{count} sets of {check.detail}")
        for check, count in zip(worst, counts, strict=True)
        if check is not None
    ]


def compared(
    trial: Trial,
    sample: Sample,
    outputs: Outputs,
    slack: float = 1.0,
    weighed: Collection[int] = (),
) -> Iterator[tuple[int, Comparison]]:
    """Each output beside eager's; bits that were found right on this set before are not weighed
    again.

    `weighed`: positions at which even eager's own numbers are compared with float64, which tells
    whether the set leaves digits.
    """
    for position, (out, expected) in enumerate(zip(outputs, sample.reference.outputs, strict=True)):
        if expected is None:
            continue
        if out is None:
            yield position, Comparison(False, detail="no tensor where eager yields one")
            continue
        known = trial.proven.get((sample.name, position))
        if known is not None and same_bits(known[0], out):
            yield position, known[1]
            continue
        found = None if position in weighed else _eagers_own(trial, sample, position, out)
        found = found or _compared_at(trial, sample, position, out, slack)
        if found.passed and slack == 1:
            trial.proven[sample.name, position] = out, found
        yield position, found


def _eagers_own(
    trial: Trial, sample: Sample, position: int, out: torch.Tensor
) -> Comparison | None:
    """The result of comparing eager's numbers with themselves: equal errors pass every criterion,
    so no float64 run need tell them.

    None for other numbers, where the float64 result is there already, and under a contract that
    asks for none.
    """
    expected = sample.reference.outputs[position]
    assert expected is not None
    if (
        "exact" in sample.__dict__
        or trial.contract.precision == "kernelbench"
        or not same_numbers(out, expected)
    ):
        return None
    return EAGERS_OWN if expected.dtype.is_floating_point else Comparison(True, 0.0, 0.0)


def _compared_at(
    trial: Trial, sample: Sample, position: int, out: torch.Tensor, slack: float
) -> Comparison:
    expected = sample.reference.outputs[position]
    assert expected is not None
    precision, longest = trial.contract.precision, trial.facts.longest_reduction
    wide = (
        expected.dtype == torch.float64
    )  # eager's own error is none there, so float64 cannot be the yardstick
    exact = None if wide or precision == "kernelbench" else sample.exact_at(position)
    asked = partial(
        compare,
        exact=exact,
        precision=precision,
        longest=longest,
        slack=slack,
        sway=partial(sample.sway_at, position),
    )
    found = asked(out, expected)
    if (
        found.passed
        and precision != "kernelbench"
        and sample.distribution == "integers"
        and _counts(trial, expected, exact)
    ):
        wrong = int((out != expected).sum())
        return Comparison(
            not wrong,
            float(wrong),
            0.0,
            f"{wrong} of {out.numel()} sums of small integers are not exact" if wrong else "",
        )
    if found.passed:
        return found
    if not expected.dtype.is_floating_point:
        return _tied(trial, sample, position, out) or found
    granted = trial.subject.granted(sample.inputs) or []
    if granted and (used := granted[position]) is not None and (within := asked(out, used)).passed:
        return replace(within, detail="within the right to TF32, of which eager makes no use here")
    for (
        other
    ) in sample.again():  # where eager itself varies from run to run, its largest error counts
        again = other.outputs[position]
        if again is not None and not same_bits(again, expected):
            found = max(found, asked(out, again), key=lambda one: one.passed)
    return found


def _tied(trial: Trial, sample: Sample, position: int, out: torch.Tensor) -> Comparison | None:
    """Indices that differ from eager's only between equal values; None where nothing is known of
    the values.
    """
    expected, subject = sample.reference.outputs[position], trial.subject
    if (
        expected is None
        or expected.dtype != torch.int64
        or out.shape != expected.shape
        or not isinstance(subject, RegionSubject)
    ):
        return None
    chosen = subject.chosen_from(sample.inputs, position)
    return (
        None
        if chosen is None
        else proven_ties(out, expected, *chosen, longest=trial.facts.longest_reduction)
    )


def _counts(trial: Trial, expected: torch.Tensor, exact: torch.Tensor | None) -> bool:
    """Eager's result is whole and free of error: sums of products of small integers. Convolutions
    may use fractions on the way.
    """
    convolutions = any(
        r != "input" and len(s.shape) > 2
        for r, s in zip(trial.subject.roles, trial.subject.specs, strict=True)
    )
    if (
        convolutions
        or exact is None
        or not expected.dtype.is_floating_point
        or expected.numel() < _COUNTED
    ):
        return False
    return (
        torch.equal(expected.double(), exact)
        and torch.equal(exact, exact.round())
        and len(exact.unique()) > 2
    )


def _numeric_check(sample: Sample, comparisons: Sequence[tuple[int, Comparison]]) -> Check:
    failed = [(position, c) for position, c in comparisons if not c.passed]
    position, worst = max(
        failed or comparisons, key=lambda pair: pair[1].ratio or 0.0, default=(0, Comparison(True))
    )
    notes = [f"{sample.distribution} inputs, output {position}"]
    if worst.detail:
        notes.append(worst.detail)
    if isinstance(exact := sample.__dict__.get("exact"), Infeasible):
        notes.append(f"no float64 run ({exact.reason})")
    if voids := sum(c.void for _, c in comparisons):
        notes.append(f"{voids} outputs without digits on these inputs")
    return Check("numerics", not failed, worst.ratio, worst.limit, "; ".join(notes))


def _distributions(trial: Trial) -> list[str]:
    """The profile's, each as often as it has seeds; without any the short plan: normal, shifted,
    one drawn in secret (small where rounding to a half type could hide a bias). Then the user's
    own.
    """
    specs = trial.subject.specs
    own = ["examples"] if trial.examples and all(t is not None for t in trial.examples) else []
    if trial.profile.distributions:
        plan = [name for _ in range(trial.profile.seeds) for name in trial.profile.distributions]
        return plan[: max(2, trial.rounds(len(plan), 0.3))] + own
    heavy = trial.device.type == "cpu" and trial.facts.flops > _HEAVY_FLOPS
    plan = ["normal", "shifted"]
    if not heavy and sum(spec.size_bytes for spec in specs) <= _HEAVY_BYTES:
        half = any(spec.dtype in _HALF for spec in specs)
        plan.append("small" if half else secrets.choice(["uniform", "large", "small"]))
    return plan + own


def first_two(trial: Trial) -> tuple[Sample, Sample]:
    first, second = list(trial.samples.values())[:2]
    return first, second
