"""Check `impostor`: outputs that are known to be wrong must be refused, or the input sets prove
nothing.

For each output the same comparator judges zeros, a constant, another input's result, the inputs,
rounded, damaged and masked results, and results of eager with one parameter zeroed or at its
initial value. What no input set tells from the right result is recorded as unobservable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import Agreement, compare_call, get_source_reference
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.compare import compare
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import DISTRIBUTIONS
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure
from torch_cudal1.judge.reference.tf32_policy import to_tf32
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["IMPOSTOR", "check_negative_controls"]

# distributions and sets that must refuse a control
# How many distributions, and how many sets in all.
_NEEDED_REFUSALS = {"fast": (1, 1), "standard": (2, 3), "strict": (2, 3)}
_ADAPTED = ("small", "large", "shifted", "uniform", "sparse", "impulse")
_TILE = 16
_MEDIAN_SAMPLE_ELEMENTS = 1 << 20


@dataclass
class _ControlResult:
    """Where one negative control was refused and where it was accepted. `basic`: nothing may ever
    be accepted in its place.
    """

    basic: bool
    refused: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)

    def has_enough_refusals(self, needed: tuple[int, int]) -> bool:
        return len(set(self.refused)) >= needed[0] and len(self.refused) >= needed[1]


def check_negative_controls(trial: Trial) -> list[CheckResult]:
    """Every negative control is refused by enough input sets. The value is the number of refused
    controls, the limit the number of those that differ from eager's result.

    Without controls of parameters the result does not depend on the candidate, so it is computed
    once for the sets that all candidates of a region share.
    """
    samples = [
        sample
        # Derived sets hold values made for one check, which prove nothing about the distribution.
        for sample in trial.samples.values()
        if sample.distribution in (*DISTRIBUTIONS, "examples")
    ]
    # With the parameters eager runs anew, and the candidate is asked as well.
    if trial.profile.all_impostors or not all(sample.is_shared for sample in samples):
        return _run_controls(trial, samples)
    # The results depend on nothing else.
    key = (trial.profile.name, trial.contract.precision, *(sample.name for sample in samples))
    shared_results = samples[0].shared_results
    if key not in shared_results:
        shared_results[key] = _run_controls(trial, samples)
    return list(shared_results[key])


def _run_controls(trial: Trial, samples: Sequence[InputSet]) -> list[CheckResult]:
    controls: dict[str, _ControlResult] = {}
    for position, expected in enumerate(samples[0].expected.outputs):
        # Integers and booleans are compared exactly, so no tolerance can let a control pass.
        if expected is not None and expected.dtype.is_floating_point and expected.numel():
            _compare_controls(trial, samples, position, controls)
    disagreement = (
        _run_parameter_controls(trial, samples, controls) if trial.profile.all_impostors else None
    )
    survivors = [name for name, control in controls.items() if not control.refused]
    lax = (
        # Tolerances of `kernelbench` are absolute: small outputs let zeros pass there, by its own
        # rule.
        [name for name in survivors if controls[name].basic]
        if trial.contract.precision != "kernelbench"
        else []
    )
    killed, total = float(len(controls) - len(survivors)), float(len(controls))
    if disagreement is not None and disagreement.problem:
        return [
            CheckResult(
                "impostor",
                False,
                disagreement.ratio,
                disagreement.limit,
                f"{disagreement.question}: {disagreement.problem}",
            )
        ]
    if lax:
        return [
            CheckResult(
                "impostor", False, killed, total, f"accepted although wrong: {', '.join(lax)}"
            )
        ]
    detail = (
        "zeros, constant, replay and inputs are refused"
        if not trial.profile.all_impostors
        else f"{total:.0f} wrong results"
    )
    if survivors:
        detail += f"; unobservable: {', '.join(survivors)}"
    needed = _NEEDED_REFUSALS[trial.profile.name]
    if weak := [
        name
        for name, control in controls.items()
        if control.refused and not control.has_enough_refusals(needed)
    ]:
        detail += f"; refused by few input sets: {', '.join(weak)}"
    return [CheckResult("impostor", True, killed, total, detail)]


def _compare_controls(
    trial: Trial, samples: Sequence[InputSet], position: int, controls: dict[str, _ControlResult]
) -> None:
    needed = _NEEDED_REFUSALS[trial.profile.name]
    # Each set's neighbour gives the result of another input.
    for sample, other in zip(samples, [*samples[1:], samples[0]], strict=True):
        for name, wrong, basic in _list_controls(
            sample, other, position, trial.profile.all_impostors
        ):
            control = controls.get(f"{name} as output {position}")
            # Enough have refused it: the comparison takes float64 results, which are the cost here.
            if control is None or not control.has_enough_refusals(needed):
                _record_comparison(
                    trial,
                    sample,
                    position,
                    wrong,
                    controls.setdefault(f"{name} as output {position}", _ControlResult(basic)),
                )
        # Float64 results of all sets at once may not fit into memory.
        sample.forget_exact()
        fates_here = [
            control for name, control in controls.items() if name.endswith(f"as output {position}")
        ]
        if fates_here and all(control.has_enough_refusals(needed) for control in fates_here):
            break
    for name in [
        name for name, control in controls.items() if not control.refused and not control.accepted
    ]:
        del controls[name]  # it never differed from eager's result


def _record_comparison(
    trial: Trial, sample: InputSet, position: int, wrong: torch.Tensor, control: _ControlResult
) -> None:
    expected = sample.expected.outputs[position]
    assert expected is not None
    # A control that equals eager's result is right.
    if torch.equal(wrong, expected):
        return
    precision, longest = trial.contract.precision, trial.facts.longest_reduction
    exact = (
        None
        if precision == "kernelbench" or expected.dtype == torch.float64
        else sample.get_exact(position)
    )
    comparison = compare(
        wrong,
        expected,
        exact,
        precision=precision,
        longest=longest,
        sensitivity=partial(sample.get_sensitivity, position),
    )
    (control.accepted if comparison.passed else control.refused).append(sample.distribution)


def _list_controls(
    sample: InputSet, other: InputSet, position: int, all_kinds: bool
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, wrong result, and whether it is one of those that must always be refused."""
    expected, replayed = sample.expected.outputs[position], other.expected.outputs[position]
    assert expected is not None
    assert replayed is not None
    yield "zeros", torch.zeros_like(expected), True
    yield "a constant", torch.full_like(expected, _estimate_median(expected)), True
    yield "another input's result", replayed, True
    for index, tensor in enumerate(sample.inputs):
        # Without a cast only an input of the same form could be handed out as the result.
        if tensor.shape == expected.shape and tensor.dtype == expected.dtype:
            yield f"input {index}", tensor, True
        elif (
            all_kinds
            and tensor.dtype.is_floating_point
            and (cast := _broadcast_like(tensor, expected)) is not None
        ):
            yield f"input {index} cast", cast, False
    if all_kinds:
        yield from _list_summaries(sample.inputs, expected)
        yield from _list_rounded(expected)
        yield from _list_damaged(expected)


def _estimate_median(expected: torch.Tensor) -> float:
    """About the median: of all elements of a large tensor it would take more memory than anything
    else does.
    """
    flat = expected.reshape(-1)
    return float(flat[:: max(1, flat.numel() // _MEDIAN_SAMPLE_ELEMENTS)].float().nanmedian())


def _broadcast_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    try:
        # `expand_as` raises where shapes do not broadcast.
        return tensor.to(like.dtype).expand_as(like).contiguous()
    except RuntimeError:
        return None


def _list_summaries(
    inputs: Sequence[torch.Tensor], expected: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for index, tensor in enumerate(inputs):
        if tensor.dtype.is_floating_point and tensor.numel():
            # A sum of many half-precision numbers overflows.
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


def _list_rounded(expected: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, bool]]:
    # Half types are rounded already.
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


def _list_damaged(expected: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, bool]]:
    # Clones: one control must not damage the next.
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


def _run_parameter_controls(
    trial: Trial, samples: Sequence[InputSet], controls: dict[str, _ControlResult]
) -> Agreement | None:
    """Eager with one parameter zeroed or at its initial value. Where the drawn sets accept that,
    other distributions are tried, and the candidate is compared on the first one that refuses it.
    Returns the first disagreement of the candidate, None if there is none.
    """
    roles = trial.reference.roles
    positions = [
        i
        for i, role in enumerate(roles)
        if role != "input" and samples[0].inputs[i].dtype.is_floating_point
    ]
    # Which of many parameters is secret, and how many is a matter of time.
    chosen = random.SystemRandom().sample(
        positions, min(len(positions), trial.count_affordable_sets(trial.profile.perturbed, 0.1))
    )
    for position in sorted(chosen):
        for change, value in _list_replacements(trial, samples[0], position):
            control = controls.setdefault(
                f"{_name_parameter(trial, position)} {change}", _ControlResult(False)
            )
            for sample in samples[:3]:
                _run_with_replacement(trial, sample, position, value, control)
            for distribution in (
                # Adapted inputs only where the drawn sets could not tell: a bias may drown in large
                # sums.
                ()
                if control.refused
                else _ADAPTED[: trial.count_affordable_sets(len(_ADAPTED), 0.02)]
            ):
                adapted = trial.derive_sibling(samples[0], distribution, 1)
                _run_with_replacement(trial, adapted, position, value, control)
                if control.refused:
                    # Inputs that show the parameter are evidence only if the candidate meets them
                    # too.
                    agreement = compare_call(
                        trial,
                        adapted,
                        f"{distribution} inputs, where {_name_parameter(trial, position)} shows",
                    )
                    if agreement is not None and agreement.problem:
                        return agreement
                    break
            if not control.refused and not control.accepted:
                del controls[f"{_name_parameter(trial, position)} {change}"]
    return None


def _list_replacements(
    trial: Trial, sample: InputSet, position: int
) -> Iterator[tuple[str, torch.Tensor]]:
    tensor = sample.inputs[position]
    yield "zeroed", torch.zeros_like(tensor)
    initial = trial.examples[position] if trial.examples else None
    # Where it was constructed as zeros, this is the case above.
    if initial is not None and bool(initial.any()):
        yield "at its initial value", initial


def _run_with_replacement(
    trial: Trial, sample: InputSet, position: int, value: torch.Tensor, control: _ControlResult
) -> None:
    inputs = [value if index == position else tensor for index, tensor in enumerate(sample.inputs)]
    try:
        outputs: Outputs = trial.reference.eager(inputs).outputs
        expected = sample.expected.outputs
    # A parameter of zeros can be outside of what eager takes.
    except ReferenceFailure:
        return
    for index, (wrong, right) in enumerate(zip(outputs, expected, strict=True)):
        # Empty outputs are equal whatever the parameter is.
        if wrong is not None and right is not None and right.numel():
            _record_comparison(trial, sample, index, wrong, control)


def _name_parameter(trial: Trial, position: int) -> str:
    reference = get_source_reference(trial)
    return (
        reference.form.names[position]
        if reference is not None
        else f"{trial.reference.roles[position]} {position}"
    )


IMPOSTOR = CheckSpec(
    name="impostor",
    run=check_negative_controls,
    failure="hack",
    knobs=("all_impostors", "perturbed", "budget_s"),
    asks=("would the comparison have refused zeros, a constant, an old answer, an input"),
)
