"""Whether rounding alone decides what a few elements of a result are: eager's own change when its
inputs move by little more than rounding.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from torch_cudal1.judge.reference.compare import unit_roundoff
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.inputs import clone_strided
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.channel import storage_extent

__all__ = ["draw_uniform", "is_decided_by_rounding"]

# of all elements: those that may differ, and those that rounding may decide at all
# Before this exception fused ResNet blocks were refused for 29 elements out of 32 million.
_MAX_WRONG_FRACTION, _MAX_STIRRED_FRACTION = (1e-4, 1e-3)
# what rounding decides changes sides in half of them: of six such numbers 12 would miss one in 700
# trials
_STIRS = 20
# units in the last place; where products round to ten bits
_STIR_ULPS, _MAX_STIR, _TF32_STIR = (64, 2.0**-6, 2.0**-8)


def is_decided_by_rounding(
    trial: Trial, sample: InputSet, position: int, wrong: torch.Tensor
) -> bool:
    """Whether rounding decides at each of the few `wrong` elements: there eager itself yields
    another of NaN, infinities and finite numbers when its inputs move by little more than rounding.
    """
    eager = sample.expected.outputs[position]
    if (
        eager is None
        or eager.shape != wrong.shape
        # Many differences are no accident of rounding.
        or int(wrong.sum()) > _MAX_WRONG_FRACTION * wrong.numel()
    ):
        return False
    try:
        # A ReLU before an infinite weight makes NaN of a zero and an infinity of a number just
        # above it: rounding decides which.
        return _changes_in_eager_too(trial, sample, position, wrong)
    # Without a further run nothing is excused.
    except (ReferenceFailure, torch.OutOfMemoryError):
        return False


def _changes_in_eager_too(
    trial: Trial, sample: InputSet, position: int, wrong: torch.Tensor
) -> bool:
    eager, changed = sample.expected.outputs[position], torch.zeros_like(wrong)
    for _ in range(_STIRS):
        moved = sample.eager(_perturb_inputs(trial, sample.inputs)).outputs[position]
        if eager is None or moved is None:
            return False
        changed |= (
            (moved.isnan() != eager.isnan())
            | (moved.isinf() != eager.isinf())
            | (moved.isinf() & (moved != eager))
        )
        # Where eager changes in many places the inputs prove nothing: a comparison with a constant
        # would excuse any element.
        if not bool((wrong & ~changed).any()):
            return int(changed.sum()) <= _MAX_STIRRED_FRACTION * changed.numel()
    return False


def _perturb_inputs(trial: Trial, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every floating number a little larger or smaller; zeros, infinities and NaN stay what they
    are.
    """
    # Products that may round to TF32 move by its unit, ten bits.
    tf32 = _TF32_STIR if trial.device.type == "cuda" and trial.contract.rights else 0.0

    def perturb_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dtype.is_floating_point or not tensor.numel():
            return tensor
        by = max(min(_STIR_ULPS * unit_roundoff(tensor.dtype), _MAX_STIR), tf32)
        copy = clone_strided(tensor)
        flat = copy.as_strided((storage_extent(copy.shape, copy.stride()),), (1,))
        # A factor leaves zeros, infinities and NaN as they are.
        flat.mul_(1 + by * (2 * draw_uniform(flat, flat.dtype) - 1))
        return copy

    return [perturb_tensor(tensor) for tensor in inputs]


def draw_uniform(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As many uniform numbers in [0, 1), from a generator of their own."""
    # The user's sequence of random numbers stays as it is.
    generator = torch.Generator(flat.device).manual_seed(secrets.randbits(63))
    return torch.rand(flat.shape, dtype=dtype, device=flat.device, generator=generator)
