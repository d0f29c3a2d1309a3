"""The detectors, one function each, and the order in which the `fast` profile asks them.

A detector looks at a `Trial` and returns its checks. Tests of speed are elsewhere; so is the decision. What `fast` leaves out
(update paths, layouts, shapes, sanitizer, ...) is not claimed: a Verdict lists what ran.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from torch_cudal1.errors import ProgramError
from torch_cudal1.judge.compare import Comparison, compare, same_bits, same_masks
from torch_cudal1.judge.inputs import clone_strided
from torch_cudal1.judge.oracle import Infeasible
from torch_cudal1.judge.sandbox import CandidateFailure
from torch_cudal1.judge.trial import Outputs, ReferenceFailure, Sample, Trial
from torch_cudal1.program.check import check_program, is_random_program
from torch_cudal1.program.model import Program
from torch_cudal1.program.operator import output_specs
from torch_cudal1.records import Candidate, Check, Region, Verdict

__all__ = [
    "FAST",
    "call_history",
    "contract",
    "fresh_output",
    "impostor",
    "numerics",
    "repeat",
    "special",
    "validate",
]

Detector: TypeAlias = Callable[[Trial], list[Check]]
_HEAVY_FLOPS = 2e11  # on the CPU a float64 run of this takes seconds
_HEAVY_BYTES = 4 << 30
_SPECIAL_INPUTS = 6
_HALF = ("float16", "bfloat16")


def validate(trial: Trial, detectors: Sequence[Detector] | None = None) -> Verdict:
    """`contract`, then the detectors in order, up to the first failed check. A child that fails or dies is a failed check."""
    checks = contract(trial.region, trial.candidate)
    for detector in FAST if detectors is None else detectors:
        if any(not check.passed for check in checks):
            break
        checks += _asked(detector, trial)
    return Verdict(tuple(checks))


def _asked(detector: Detector, trial: Trial) -> list[Check]:
    try:
        return detector(trial)
    except CandidateFailure as error:
        return [Check(error.detector, False, detail=f"{error.stage}: {error.found}")]
    except ReferenceFailure as error:
        return [Check("inputs", False, detail=f"eager refuses the inputs made for it: {error.found}")]


def contract(region: Region, candidate: Candidate) -> list[Check]:
    """Well formed, the region's inputs and outputs in dtype, shape and strides, nothing unused, no random numbers."""
    program, reference = candidate.program, region.program
    try:
        check_program(program)
        if program.inputs != reference.inputs:
            raise ProgramError("inputs", "the inputs are not the region's")
        if is_random_program(program) or is_random_program(reference):
            raise ProgramError("random", "random numbers would have to follow eager's stream; such regions are not judged")
        if [out is None for out in program.outputs] != [out is None for out in reference.outputs]:
            raise ProgramError("outputs", "the outputs are not the region's")
        problem = _output_problem(program, reference)
        if problem:
            raise ProgramError("outputs", problem)
    except ProgramError as error:
        return [Check("contract", False, detail=str(error))]
    return [Check("contract", True)]


def _output_problem(program: Program, reference: Program) -> str:
    found, expected = output_specs(program), output_specs(reference)
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is not None and other is not None and (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"output {position} is {one.dtype}{list(one.shape)}, expected {other.dtype}{list(other.shape)}"
    return ""


def numerics(trial: Trial) -> list[Check]:
    """The criterion of `compare` on secret inputs, the candidate before the reference; one check per input set."""
    checks: list[Check] = []
    evidence: set[int] = set()
    for distribution in _distributions(trial):
        sample = trial.draw(distribution)
        result = trial.run(sample)
        trial.results[sample.name] = result
        comparisons = list(_compared(trial, sample, result.outputs))
        evidence |= {position for position, comparison in comparisons if not comparison.void}
        checks.append(_numeric_check(sample, comparisons))
        sample.forget_exact()
        if not checks[-1].passed:
            return checks
    blind = [i for i, out in enumerate(trial.region.program.outputs) if out is not None and i not in evidence]
    if blind:
        checks.append(Check("numerics", False, detail=f"no input set leaves digits to compare in output {blind[0]}"))
    return checks


def _compared(trial: Trial, sample: Sample, outputs: Outputs) -> Iterator[tuple[int, Comparison]]:
    for position, (out, expected) in enumerate(zip(outputs, sample.reference.outputs, strict=True)):
        if expected is None:
            continue
        if out is None:
            yield position, Comparison(False, detail="no tensor where eager yields one")
            continue
        exact = None if trial.contract.precision == "kernelbench" else sample.exact_at(position)
        longest = trial.facts.longest_reduction
        yield position, compare(out, expected, exact, precision=trial.contract.precision, longest=longest)


def _numeric_check(sample: Sample, comparisons: Sequence[tuple[int, Comparison]]) -> Check:
    failed = [(position, c) for position, c in comparisons if not c.passed]
    position, worst = max(failed or comparisons, key=lambda pair: pair[1].ratio or 0.0, default=(0, Comparison(True)))
    notes = [f"{sample.distribution} inputs, output {position}"]
    if worst.detail:
        notes.append(worst.detail)
    if isinstance(exact := sample.__dict__.get("exact"), Infeasible):
        notes.append(f"no float64 run ({exact.reason})")
    if voids := sum(c.void for _, c in comparisons):
        notes.append(f"{voids} outputs without digits on these inputs")
    return Check("numerics", not failed, worst.ratio, worst.limit, "; ".join(notes))


def _distributions(trial: Trial) -> list[str]:
    """Normal, shifted, one drawn in secret (small where rounding to a half type could hide a bias), and the user's own."""
    specs = trial.region.program.inputs
    heavy = trial.device.type == "cpu" and trial.facts.flops > _HEAVY_FLOPS
    plan = ["normal", "shifted"]
    if not heavy and sum(spec.size_bytes for spec in specs) <= _HEAVY_BYTES:
        half = any(spec.dtype in _HALF for spec in specs)
        plan.append("small" if half else secrets.choice(["uniform", "large", "small"]))
    return plan + (["examples"] if trial.examples is not None else [])


def fresh_output(trial: Trial) -> list[Check]:
    """Exact type, form and strides of eager's outputs; memory of its own; an output in the caller's hands never changes."""
    first, second = _first_two(trial)
    checks = [_form(trial, first), _inputs_kept(trial, (first, second))]
    held = [trial.run(first, hold=True), trial.run(second, hold=True), trial.run(first, hold=True)]
    trial.results[f"{first.name}/1"], trial.results[f"{second.name}/1"], trial.results[f"{first.name}/2"] = held
    shared = [i for result in held for i, facts in enumerate(result.facts) if facts and facts["held"]]
    now = trial.reread(0)
    changed = [i for i, (then, here) in enumerate(zip(held[0].outputs, now, strict=True)) if not same_bits(then, here)]
    detail = ""
    if shared:
        detail = f"output {shared[0]} shares memory with an earlier call's output"
    elif changed:
        detail = f"output {changed[0]} changed while the caller held it"
    trial.child.call("drop", names=[])
    return [*checks, Check("fresh_output", not detail, detail=detail or "2 outputs held over later calls")]


def _form(trial: Trial, sample: Sample) -> Check:
    reference = sample.reference.facts
    for position, (found, expected) in enumerate(zip(trial.results[sample.name].facts, reference, strict=True)):
        if found is None or expected is None:
            continue
        where = f"output {position}"
        for name in ("dtype", "shape", "strides", "device"):
            if found[name] != expected[name]:
                return Check("fresh_output", False, detail=f"{where}: {name} {found[name]}, eager's {expected[name]}")
        if not found["exact_type"] or not found["storage"]:
            return Check("fresh_output", False, detail=f"{where} is no plain tensor with its own bytes")
        for name in ("inputs", "outputs"):
            if extra := set(found[name]) - set(expected[name]):
                return Check("fresh_output", False, detail=f"{where} shares memory with {name} {sorted(extra)}, eager's does not")
    return Check("fresh_output", True, detail="form, strides and memory as eager's")


def _inputs_kept(trial: Trial, samples: Sequence[Sample]) -> Check:
    for sample in samples:
        changed = trial.child.call("unchanged", name=sample.name).get("changed")
        if changed != []:
            return Check("fresh_output", False, detail=f"inputs {changed} were written to")
    return Check("fresh_output", True, detail="inputs unchanged")


def call_history(trial: Trial) -> list[Check]:
    """A, B, A: what an earlier call computed has no influence."""
    first, second = _first_two(trial)
    for name, sample in ((f"{second.name}/1", second), (f"{first.name}/2", first)):
        before, again = trial.results[sample.name].outputs, trial.results[name].outputs
        if all(same_bits(a, b) for a, b in zip(before, again, strict=True)):
            continue
        failed = [position for position, comparison in _compared(trial, sample, again) if not comparison.passed]
        if failed:
            return [Check("call_history", False, detail=f"output {failed[0]} is wrong when other inputs came before")]
    return [Check("call_history", True, detail="A-B-A")]


def repeat(trial: Trial) -> list[Check]:
    """The same inputs give the same bits, three times; a candidate may vary only where eager does."""
    first, _ = _first_two(trial)
    runs = [trial.results[name].outputs for name in (first.name, f"{first.name}/1", f"{first.name}/2")]
    stable = all(same_bits(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))
    if stable:
        return [Check("repeat", True, detail="3 runs, equal bits")]
    own = [trial.eager(first.inputs).outputs for _ in range(2)]
    varies = any(not same_bits(a, b) for other in own for a, b in zip(first.reference.outputs, other, strict=True))
    detail = "bits differ between runs, as eager's do" if varies else "bits differ between runs, eager's do not"
    return [Check("repeat", varies, detail=detail)]


def special(trial: Trial) -> list[Check]:
    """One NaN, one infinity, in each floating input in turn: they must reach what they reach in eager."""
    if trial.contract.assume_finite:
        return [Check("special", True, detail="not tested: the user promised finite values (assume_finite)")]
    sample, _ = _first_two(trial)
    positions = _special_positions(trial, sample)
    if not positions:
        return [Check("special", True, detail="not applicable: no floating input")]
    checks: list[Check] = []
    for what, value in (("NaN", float("nan")), ("infinity", float("inf"))):
        for position in positions:
            variant = trial.variant(sample, position, _with_one(sample.inputs[position], value), what)
            failed = _masks_differ(trial, variant, trial.run(variant).outputs)
            trial.drop(variant)
            if failed:
                return [*checks, Check("special", False, detail=f"one {what} in input {position}{failed}")]
        checks.append(Check("special", True, detail=f"one {what} in each of inputs {positions}"))
    return checks


def _special_positions(trial: Trial, sample: Sample) -> list[int]:
    """Floating inputs, those that are no parameters first, at most six; which of many is a secret."""
    floating = [i for i, t in enumerate(sample.inputs) if t.dtype.is_floating_point and t.numel()]
    drawn = random.SystemRandom().sample(floating, len(floating))
    return sorted(sorted(drawn, key=lambda i: trial.region.roles[i] != "input")[:_SPECIAL_INPUTS])


def _with_one(tensor: torch.Tensor, value: float) -> torch.Tensor:
    copy = clone_strided(tensor)
    index = tuple(random.SystemRandom().randrange(size) for size in tensor.shape)
    copy.as_strided((1,), (1,), sum(i * s for i, s in zip(index, tensor.stride(), strict=True))).fill_(value)
    return copy


def _masks_differ(trial: Trial, sample: Sample, outputs: Outputs) -> str:
    """What differs, "" if nothing does. Inductor lowers some operators to formulas that treat infinities differently from eager's
    kernels; under an Inductor schedule the reference under that schedule, PyTorch's own work, is as good a witness.
    """
    for position, (out, expected) in enumerate(zip(outputs, sample.reference.outputs, strict=True)):
        if out is None or expected is None or same_masks(out, [expected]).passed:
            continue
        witnesses = [expected]
        if trial.candidate.schedule.partition("+")[0] != "eager":
            compiled = trial.reference_in_child(trial.candidate.schedule, sample)[position]
            witnesses += [] if compiled is None else [compiled]
        found = same_masks(out, witnesses, sample.exact_at(position))  # eager's algorithm may spread a NaN where float64 does not
        if not found.passed:
            return f"; output {position}: {found.detail}"
    return ""


def impostor(trial: Trial) -> list[Check]:
    """The comparator must refuse outputs that are known to be wrong on at least one input set, or the inputs prove nothing."""
    samples = list(trial.samples.values())
    survivors: list[str] = []
    for position, expected in enumerate(samples[0].reference.outputs):
        if expected is not None and expected.dtype.is_floating_point and expected.numel():
            survivors += [f"{name} as output {position}" for name in _survivors(trial, samples, position)]
    lax = bool(survivors) and trial.contract.precision != "kernelbench"
    detail = f"accepted although wrong: {', '.join(survivors)}" if survivors else "zeros, constant, replay and inputs are refused"
    return [Check("impostor", not lax, detail=detail)]


def _survivors(trial: Trial, samples: Sequence[Sample], position: int) -> list[str]:
    accepted: dict[str, bool] = {}  # True: accepted so far, and it is not what eager yields
    for own, other in zip(samples, [*samples[1:], samples[0]], strict=True):
        expected = own.reference.outputs[position]
        assert expected is not None
        exact = None if trial.contract.precision == "kernelbench" else own.exact_at(position)
        for name, wrong in _impostors(own, other, position):
            if accepted.get(name) is False or torch.equal(wrong, expected):
                continue
            found = compare(wrong, expected, exact, precision=trial.contract.precision, longest=trial.facts.longest_reduction)
            accepted[name] = found.passed
        own.forget_exact()
        if accepted and not any(accepted.values()):
            break
    return [name for name, alive in accepted.items() if alive]


def _impostors(own: Sample, other: Sample, position: int) -> Iterator[tuple[str, torch.Tensor]]:
    expected, replayed = own.reference.outputs[position], other.reference.outputs[position]
    assert expected is not None
    assert replayed is not None
    yield "zeros", torch.zeros_like(expected)
    yield "a constant", torch.full_like(expected, float(expected.float().nanmedian()))
    yield "another input's result", replayed
    for index, tensor in enumerate(own.inputs):
        if tensor.shape == expected.shape and tensor.dtype == expected.dtype:
            yield f"input {index}", tensor


def _first_two(trial: Trial) -> tuple[Sample, Sample]:
    first, second = list(trial.samples.values())[:2]
    return first, second


FAST: tuple[Detector, ...] = (numerics, fresh_output, call_history, repeat, special, impostor)
