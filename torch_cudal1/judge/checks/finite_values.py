"""Compares the finite elements of a result that has NaN or infinities elsewhere.

A kernel may take another way for a whole call because one input is not finite, and be wrong in all
that the NaN does not reach. Where NaN and infinities lie is `special_values`' question.
"""

from __future__ import annotations

import torch

from torch_cudal1.judge.reference.compare import Comparison, compare
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.trial import Trial

__all__ = ["compare_finite_elements"]

# `numerics` asks how exact results are; here a result need only be that of its inputs.
_SLACK = 4.0
# Of a row's own values: what is nearer to eager needs no float64 run.
_NEAR = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
_NEAR_OF_OTHERS = 1e-4
_RIGHT = Comparison(True)


def compare_finite_elements(
    trial: Trial, sample: InputSet, position: int, out: torch.Tensor
) -> Comparison:
    """Output number `position`, where it and eager's are finite, as near to float64 as eager's is,
    or as eager's with TF32 where the contract allows it.
    """
    eager = sample.expected.outputs[position]
    if eager is None or not eager.dtype.is_floating_point or not eager.numel():
        return _RIGHT
    finite = out.isfinite() & eager.isfinite()
    if _is_near(_keep(out, finite), _keep(eager, finite)):
        return _RIGHT
    exact = None if eager.dtype == torch.float64 else sample.get_exact(position)
    if exact is not None:
        finite = finite & exact.isfinite()
    comparison = _compare(trial, out, eager, exact, finite)
    if comparison.passed:
        return comparison
    tf32_outputs = trial.reference.eager_with_tf32(sample.inputs) or []
    with_tf32 = tf32_outputs[position] if tf32_outputs else None
    if with_tf32 is None:
        return comparison
    within = _compare(trial, out, with_tf32, exact, finite & with_tf32.isfinite())
    return within if within.passed else comparison


def _compare(
    trial: Trial,
    out: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor | None,
    finite: torch.Tensor,
) -> Comparison:
    return compare(
        _keep(out, finite),
        _keep(eager, finite),
        None if exact is None else _keep(exact, finite),
        precision=trial.contract.precision,
        longest=trial.facts.longest_reduction,
        slack=_SLACK,
    )


def _keep(tensor: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    return torch.where(finite, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def _is_near(out: torch.Tensor, eager: torch.Tensor) -> bool:
    rows = eager.reshape(-1, eager.shape[-1] if eager.dim() else 1).double()
    differences = out.reshape(rows.shape).double() - rows
    near = _NEAR.get(eager.dtype, _NEAR_OF_OTHERS)
    return bool((differences.square().sum(1) <= near**2 * rows.square().sum(1)).all())
