"""Check of precision taken without a right: TF32 in one class of operators hidden behind the
error of another that may use it.

Where convolutions may use TF32 and products may not (PyTorch's defaults), inputs that make the
convolutions exact leave only the error of the products. TF32 exists on CUDA only. The rank
of a parameter says which class it belongs to.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_call,
    report_not_applicable,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["RIGHTS", "check_tf32_policy", "make_exact_for_class"]

_CLASSES = ("matmul", "conv")


def check_tf32_policy(trial: Trial) -> list[CheckResult]:
    """Products and convolutions in turn made exact, so that the other class shows its own error."""
    if trial.device.type != "cuda":
        return report_not_applicable("rights", "TF32 exists on CUDA only")
    # With equal rights no class could hide behind another.
    if trial.contract.precision != "match" or len(trial.contract.rights) != 1:
        return report_not_applicable("rights", "all classes of operators have the same rights")
    ranks = {
        len(spec.shape)
        for spec, role in zip(trial.reference.specs, trial.reference.roles, strict=True)
        if role == "parameter"
    }
    # A linear layer has a matrix, a convolution more dimensions: without both there is one class.
    if not (2 in ranks and max(ranks) > 2):
        return report_not_applicable(
            "rights", "there are no parameters of both products and convolutions"
        )
    free = trial.contract.rights[0]
    inputs = make_exact_for_class(trial, free)
    # Made here and not by `draw`: one class exact and the other not is no distribution.
    sample = trial.derive(trial.draw("normal"), f"{free} exact", lambda _: inputs)
    agreements: list[Agreement | None] = [compare_call(trial, sample, f"{free} exact")]
    return summarise("rights", agreements, "eager refuses the inputs")


def make_exact_for_class(trial: Trial, free: str) -> list[torch.Tensor | None]:
    """Inputs on which one class of operators is exact in TF32: plain inputs and the parameters of
    that class are zeros and ones; other parameters are drawn as usual.
    """
    # Sums of zeros and ones are exact in TF32, so the free class makes no error.
    counts, noise = (_draw(trial, distribution) for distribution in ("integers", "normal"))
    exact_ranks = (2,) if free == "matmul" else (3, 4, 5)
    values: list[torch.Tensor | None] = []
    for count, number, role in zip(counts, noise, trial.reference.roles, strict=True):
        # Inputs feed both classes; parameters of the other class stay ordinary numbers.
        values.append(count if role == "input" or count.dim() in exact_ranks else number)
    return values


def _draw(trial: Trial, distribution: str) -> Sequence[torch.Tensor]:
    return make_inputs(
        trial.reference, secrets.randbits(62), distribution, trial.device, examples=trial.examples
    )


RIGHTS = CheckSpec(
    name="rights",
    run=check_tf32_policy,
    asks="on a GPU: is TF32 used in no class of operators that has no right to it",
)
