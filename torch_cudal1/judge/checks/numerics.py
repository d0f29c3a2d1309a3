"""Check `numerics`: the candidate against eager and float64 on many secret input sets."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.gpu_memory import max_cached_bytes
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.compare import Comparison
from torch_cudal1.judge.reference.input_cache import count_tensor_bytes
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.output_comparison import compare_outputs
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["NUMERICS", "check_numerics"]

_HEAVY_FLOPS = 2e11  # on the CPU a float64 run of this takes seconds
_HEAVY_BYTES = 4 << 30
_MAX_KEPT_SETS = 3  # of a distribution, for the checks that follow
_MIN_KEPT_SETS = 2  # which the checks that follow need, see `Trial.first_two`
_HALF = ("float16", "bfloat16")


def check_numerics(trial: Trial) -> list[CheckResult]:
    """The criterion of `compare` on secret inputs, the candidate before the reference; one result
    per distribution.
    """
    results: dict[str, list[CheckResult]] = {}
    with_digits: set[int] = set()
    for distribution in _choose_distributions(trial):
        sample = trial.draw(distribution)
        # the candidate runs first: memory that the reference leaves behind would hold the answer
        result = trial.run(sample)
        # Outputs of which no set has left digits are compared with float64 even where they are
        # eager's numbers: `void` says whether this set leaves some.
        undecided = _list_outputs_without_digits(trial, with_digits)
        comparisons = list(compare_outputs(trial, sample, result.outputs, weighed=undecided))
        with_digits |= {position for position, each in comparisons if not each.void}
        results.setdefault(distribution, []).append(_summarise_set(sample, comparisons))
        # Float64 results are the largest tensors here; later checks ask for few of them again.
        sample.forget_exact()
        if not results[distribution][-1].passed:
            return [*_summarise_distributions(results), results[distribution][-1]]
        is_large = count_tensor_bytes(sample.inputs) > max_cached_bytes(trial.device.type)
        # Checks that follow start from a few sets; large ones are handed over again when they are
        # needed.
        if len(results[distribution]) <= _MAX_KEPT_SETS and (
            len(results) <= _MIN_KEPT_SETS or not is_large
        ):
            # its form, which `fresh_output` asks for
            trial.results[sample.name] = replace(result, outputs=[])
        else:
            trial.drop(sample)
        # Results of one set must not stay alive beside those of the next.
        del result, comparisons
        trial.forget_computed()
    undecided = _list_outputs_without_digits(trial, with_digits)
    # Eager's own error leaves no digits anywhere: then nothing was compared, and that is no pass.
    if undecided:
        blind = CheckResult(
            "numerics",
            False,
            detail=f"no input set leaves digits to compare in output {undecided[0]}",
        )
        return [*_summarise_distributions(results), blind]
    return _summarise_distributions(results)


def _list_outputs_without_digits(trial: Trial, with_digits: set[int]) -> list[int]:
    """Outputs of which no set has left digits to compare so far."""
    return [
        position
        for position, is_tensor in enumerate(trial.reference.outputs)
        if is_tensor and position not in with_digits
    ]


def _summarise_distributions(results: Mapping[str, list[CheckResult]]) -> list[CheckResult]:
    """One result per distribution: the worst ratio of its sets."""
    worst = [
        max(
            (result for result in of_sets if result.passed),
            key=lambda result: result.value or 0.0,
            default=None,
        )
        for of_sets in results.values()
    ]
    counts = [len(of_sets) for of_sets in results.values()]
    return [
        result if count == 1 else replace(result, detail=f"{count} sets of {result.detail}")
        for result, count in zip(worst, counts, strict=True)
        if result is not None
    ]


def _summarise_set(sample: InputSet, comparisons: Sequence[tuple[int, Comparison]]) -> CheckResult:
    failed = [(position, each) for position, each in comparisons if not each.passed]
    position, worst = max(
        failed or comparisons, key=lambda pair: pair[1].ratio or 0.0, default=(0, Comparison(True))
    )
    notes = [f"{sample.distribution} inputs, output {position}"]
    if worst.detail:
        notes.append(worst.detail)
    if isinstance(exact := sample.computed_exact, Refusal):
        notes.append(f"no float64 run ({exact.reason})")
    if voids := sum(each.void for _, each in comparisons):
        notes.append(f"{voids} outputs without digits on these inputs")
    return CheckResult("numerics", not failed, worst.ratio, worst.limit, "; ".join(notes))


def _choose_distributions(trial: Trial) -> list[str]:
    """The profile's, each as often as it has seeds; without any the short plan: normal, shifted,
    one drawn in secret. Then the user's own.
    """
    specs = trial.reference.specs
    # Inputs that are given in part cannot be called with.
    users = ["examples"] if trial.examples and all(t is not None for t in trial.examples) else []
    if trial.profile.distributions:
        plan = [name for _ in range(trial.profile.seeds) for name in trial.profile.distributions]
        # At least two: later checks start from two sets.
        return plan[: max(2, trial.count_affordable_sets(len(plan), 0.3))] + users
    is_heavy = trial.device.type == "cpu" and trial.facts.flops > _HEAVY_FLOPS
    plan = ["normal", "shifted"]
    if not is_heavy and sum(spec.size_bytes for spec in specs) <= _HEAVY_BYTES:
        # small inputs where rounding to a half type could hide a bias
        has_halves = any(spec.dtype in _HALF for spec in specs)
        plan.append("small" if has_halves else secrets.choice(["uniform", "large", "small"]))
    return plan + users


NUMERICS = CheckSpec(
    name="numerics",
    run=check_numerics,
    knobs=("distributions", "seeds", "budget_s"),
    asks=(
        "on secret inputs of many distributions and on the reference's own: rms error against "
        "float64 at most twice eager's (of a Program's: or twice what eager would have if it used "
        "all the TF32 that the settings allow), and no element far off, by the size of its row or, "
        "where sums cancel, of their terms; of fewer than 64 results eager's error is a draw, and a "
        "round-off of their terms for each level of a tree of additions is allowed as well"
    ),
)
