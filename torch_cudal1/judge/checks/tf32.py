"""Detector of precision taken without a right: TF32 in one class of operators hidden behind the
error of another that may use it.

Where convolutions may use TF32 and products may not (PyTorch's defaults), inputs that make the
convolutions exact leave only the error of the products. TF32 exists on CUDA only. Which parameter
belongs to which class is told by its rank.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.checks.agreement import Agreement, not_applicable, summed_up, tried
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["exact_for_class", "rights"]

_CLASSES = ("matmul", "conv")


def rights(trial: Trial) -> list[Check]:
    """Products and convolutions in turn made exact, so that the other class shows its own error."""
    if trial.device.type != "cuda":
        return not_applicable("rights", "TF32 exists on CUDA only")
    if trial.contract.precision != "match" or len(trial.contract.rights) != 1:
        return not_applicable("rights", "all classes of operators have the same rights")
    ranks = {
        len(spec.shape)
        for spec, role in zip(trial.subject.specs, trial.subject.roles, strict=True)
        if role == "parameter"
    }
    if not (2 in ranks and max(ranks) > 2):
        return not_applicable("rights", "there are no parameters of both products and convolutions")
    free = trial.contract.rights[0]
    inputs = exact_for_class(trial, free)
    sample = trial.derive(trial.draw("normal"), f"{free} exact", lambda _: inputs)
    found: list[Agreement | None] = [tried(trial, sample, f"{free} exact")]
    return summed_up("rights", found, "eager refuses the inputs")


def exact_for_class(trial: Trial, free: str) -> list[torch.Tensor | None]:
    """Plain inputs and the parameters of a class as zeros and ones, so that TF32 loses nothing
    there; the rest as ever.
    """
    counts, noise = (_drawn(trial, distribution) for distribution in ("integers", "normal"))
    exact_ranks = (2,) if free == "matmul" else (3, 4, 5)
    made: list[torch.Tensor | None] = []
    for whole, random, role in zip(counts, noise, trial.subject.roles, strict=True):
        made.append(whole if role == "input" or whole.dim() in exact_ranks else random)
    return made


def _drawn(trial: Trial, distribution: str) -> Sequence[torch.Tensor]:
    return make_inputs(
        trial.subject, secrets.randbits(62), distribution, trial.device, examples=trial.examples
    )
