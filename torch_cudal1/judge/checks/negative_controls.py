"""The judge judged: outputs that are known to be wrong must be refused, or the input sets prove
nothing.

For each output the same comparator meets zeros, a constant, another input's result, the inputs,
rounded, damaged and masked results, and results of eager with one parameter zeroed or at its
initial value. What no input set tells apart is recorded as unobservable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.agreement import Agreement, pair_of, tried
from torch_cudal1.judge.reference.compare import compare
from torch_cudal1.judge.reference.input_set import Sample
from torch_cudal1.judge.reference.inputs import DISTRIBUTIONS
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure
from torch_cudal1.judge.reference.tf32_policy import to_tf32
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["impostor"]

_ENOUGH = {
    "fast": (1, 1),
    "standard": (2, 3),
    "strict": (2, 3),
}  # distributions and sets that must refuse an impostor
_ADAPTED = ("small", "large", "shifted", "uniform", "sparse", "impulse")
_TILE = 16
_LOOKED_AT = 1 << 20


@dataclass
class _Fate:
    """Where one impostor was refused and where it was accepted. `basic`: nothing may ever be
    accepted in its place.
    """

    basic: bool
    refused: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)

    def enough(self, wanted: tuple[int, int]) -> bool:
        return len(set(self.refused)) >= wanted[0] and len(self.refused) >= wanted[1]


def impostor(trial: Trial) -> list[Check]:
    """Every impostor is refused by enough input sets; the number of refused ones of all that differ
    from eager's result.

    Unless parameters are tried too, no candidate has a part in that: of sets that all candidates of
    a region meet it is asked once.
    """
    samples = [
        sample
        for sample in trial.samples.values()
        if sample.distribution in (*DISTRIBUTIONS, "examples")
    ]
    if trial.profile.all_impostors or not all(sample.kept for sample in samples):
        return _asked(trial, samples)
    key = (trial.profile.name, trial.contract.precision, *(sample.name for sample in samples))
    known = samples[0].findings
    if key not in known:
        known[key] = _asked(trial, samples)
    return list(known[key])


def _asked(trial: Trial, samples: Sequence[Sample]) -> list[Check]:
    fates: dict[str, _Fate] = {}
    for position, expected in enumerate(samples[0].reference.outputs):
        if expected is not None and expected.dtype.is_floating_point and expected.numel():
            _meet(trial, samples, position, fates)
    found = _parameters(trial, samples, fates) if trial.profile.all_impostors else None
    survivors = [name for name, fate in fates.items() if not fate.refused]
    lax = (
        [name for name in survivors if fates[name].basic]
        if trial.contract.precision != "kernelbench"
        else []
    )
    killed, total = float(len(fates) - len(survivors)), float(len(fates))
    if found is not None and found.problem:
        return [
            Check("impostor", False, found.ratio, found.limit, f"{found.what}: {found.problem}")
        ]
    if lax:
        return [
            Check("impostor", False, killed, total, f"accepted although wrong: {', '.join(lax)}")
        ]
    detail = (
        "zeros, constant, replay and inputs are refused"
        if not trial.profile.all_impostors
        else f"{total:.0f} wrong results"
    )
    if survivors:
        detail += f"; unobservable: {', '.join(survivors)}"
    wanted = _ENOUGH[trial.profile.name]
    if weak := [name for name, fate in fates.items() if fate.refused and not fate.enough(wanted)]:
        detail += f"; refused by few input sets: {', '.join(weak)}"
    return [Check("impostor", True, killed, total, detail)]


def _meet(trial: Trial, samples: Sequence[Sample], position: int, fates: dict[str, _Fate]) -> None:
    wanted = _ENOUGH[trial.profile.name]
    for own, other in zip(samples, [*samples[1:], samples[0]], strict=True):
        for name, wrong, basic in _impostors(own, other, position, trial.profile.all_impostors):
            fate = fates.get(f"{name} as output {position}")
            if fate is None or not fate.enough(wanted):
                _judge(
                    trial,
                    own,
                    position,
                    wrong,
                    fates.setdefault(f"{name} as output {position}", _Fate(basic)),
                )
        own.forget_exact()
        ours = [fate for name, fate in fates.items() if name.endswith(f"as output {position}")]
        if ours and all(fate.enough(wanted) for fate in ours):
            break
    for name in [name for name, fate in fates.items() if not fate.refused and not fate.accepted]:
        del fates[name]  # it never differed from eager's result


def _judge(trial: Trial, sample: Sample, position: int, wrong: torch.Tensor, fate: _Fate) -> None:
    expected = sample.reference.outputs[position]
    assert expected is not None
    if torch.equal(wrong, expected):
        return
    precision, longest = trial.contract.precision, trial.facts.longest_reduction
    exact = (
        None
        if precision == "kernelbench" or expected.dtype == torch.float64
        else sample.exact_at(position)
    )
    found = compare(
        wrong,
        expected,
        exact,
        precision=precision,
        longest=longest,
        sway=partial(sample.sway_at, position),
    )
    (fate.accepted if found.passed else fate.refused).append(sample.distribution)


def _impostors(
    own: Sample, other: Sample, position: int, everything: bool
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, wrong result, and whether it is one of those that must always be refused."""
    expected, replayed = own.reference.outputs[position], other.reference.outputs[position]
    assert expected is not None
    assert replayed is not None
    yield "zeros", torch.zeros_like(expected), True
    yield "a constant", torch.full_like(expected, _middle(expected)), True
    yield "another input's result", replayed, True
    for index, tensor in enumerate(own.inputs):
        if tensor.shape == expected.shape and tensor.dtype == expected.dtype:
            yield f"input {index}", tensor, True
        elif (
            everything
            and tensor.dtype.is_floating_point
            and (cast := _broadcast(tensor, expected)) is not None
        ):
            yield f"input {index} cast", cast, False
    if everything:
        yield from _summaries(own.inputs, expected)
        yield from _rounded(expected)
        yield from _damaged(expected)


def _middle(expected: torch.Tensor) -> float:
    """About the median: of all elements of a large tensor it would take more memory than anything
    else does.
    """
    flat = expected.reshape(-1)
    return float(flat[:: max(1, flat.numel() // _LOOKED_AT)].float().nanmedian())


def _broadcast(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.to(like.dtype).expand_as(like).contiguous()
    except RuntimeError:
        return None


def _summaries(
    inputs: Sequence[torch.Tensor], expected: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for index, tensor in enumerate(inputs):
        if tensor.dtype.is_floating_point and tensor.numel():
            wide = tensor.double()
            for name, value in (
                ("mean", wide.mean()),
                ("maximum", wide.max()),
                ("sum", wide.sum()),
            ):
                yield f"{name} of input {index}", torch.full_like(expected, float(value)), False
    if expected.dim() > 1:
        yield (
            "the mean of each channel",
            expected.double().mean(0, keepdim=True).to(expected.dtype).expand_as(expected),
            False,
        )


def _rounded(expected: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, bool]]:
    if expected.dtype not in (torch.float32, torch.float64):
        return
    for dtype in (torch.bfloat16, torch.float16):
        yield (
            f"eager's result rounded to {str(dtype).removeprefix('torch.')}",
            expected.to(dtype).to(expected.dtype),
            False,
        )
    if expected.dtype == torch.float32:
        yield "eager's result rounded to TF32", to_tf32(expected), False


def _damaged(expected: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """The last element, a row, a tile left at zero; NaN masked, infinities clipped."""
    last, row = expected.contiguous().clone(), expected.contiguous().clone()
    last.view(-1)[-1] = 0
    yield "the last element unwritten", last, False
    if expected.dim() > 1:
        row[-1] = 0
        yield "the last row unwritten", row, False
        tile = expected.contiguous().clone()
        tile[..., -_TILE:, -_TILE:] = 0
        yield "a tile unwritten", tile, False
    if not bool(expected.isfinite().all()):
        yield "NaN and infinities replaced", expected.nan_to_num(), False


def _parameters(
    trial: Trial, samples: Sequence[Sample], fates: dict[str, _Fate]
) -> Agreement | None:
    """Eager with one parameter zeroed or as it was constructed. Where the drawn sets accept that,
    other distributions are tried: one that tells them apart is asked of the candidate too. The
    first disagreement found on the way.
    """
    roles = trial.subject.roles
    positions = [
        i
        for i, role in enumerate(roles)
        if role != "input" and samples[0].inputs[i].dtype.is_floating_point
    ]
    chosen = random.SystemRandom().sample(
        positions, min(len(positions), trial.rounds(trial.profile.perturbed, 0.1))
    )
    for position in sorted(chosen):
        for what, value in _replacements(trial, samples[0], position):
            fate = fates.setdefault(f"{_name(trial, position)} {what}", _Fate(False))
            for sample in samples[:3]:
                _without(trial, sample, position, value, fate)
            for distribution in (
                () if fate.refused else _ADAPTED[: trial.rounds(len(_ADAPTED), 0.02)]
            ):
                adapted = trial.sibling(samples[0], distribution, 1)
                _without(trial, adapted, position, value, fate)
                if fate.refused:
                    found = tried(
                        trial,
                        adapted,
                        f"{distribution} inputs, where {_name(trial, position)} shows",
                    )
                    if found is not None and found.problem:
                        return found
                    break
            if not fate.refused and not fate.accepted:
                del fates[f"{_name(trial, position)} {what}"]
    return None


def _replacements(
    trial: Trial, sample: Sample, position: int
) -> Iterator[tuple[str, torch.Tensor]]:
    tensor = sample.inputs[position]
    yield "zeroed", torch.zeros_like(tensor)
    initial = trial.examples[position] if trial.examples else None
    if initial is not None and bool(initial.any()):
        yield "at its initial value", initial


def _without(trial: Trial, sample: Sample, position: int, value: torch.Tensor, fate: _Fate) -> None:
    inputs = [value if index == position else tensor for index, tensor in enumerate(sample.inputs)]
    try:
        outputs: Outputs = trial.subject.eager(inputs).outputs
        expected = sample.reference.outputs
    except ReferenceFailure:
        return
    for index, (wrong, right) in enumerate(zip(outputs, expected, strict=True)):
        if wrong is not None and right is not None and right.numel():
            _judge(trial, sample, index, wrong, fate)


def _name(trial: Trial, position: int) -> str:
    subject = pair_of(trial)
    return (
        subject.form.names[position]
        if subject is not None
        else f"{trial.subject.roles[position]} {position}"
    )
