"""Whether the package's answer is right: against a float64 run of the task on inputs that no search
has seen, as everywhere in benchmarks.

Where a task cannot be run in float64 (it makes float32 tensors itself, or is too large for it), the
answer is compared with eager's, and the row says so. Every call starts from the same random state,
so that tasks that draw numbers are comparable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.compare import Reference, compare, make_reference
from benchmarks.kernelbench.baselines import Call, copy_tensors, find_gross_error
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import contract_for
from torch_cudal1.graph.functional_module import copy_module
from torch_cudal1.judge.reference.tf32_policy import Tf32OperandRounding

__all__ = ["CheckOutcome", "Expected", "check_column", "compute_expected"]

# of large results one run: their error is that of many elements already
_EAGER_RUNS, _LARGE_BYTES = 2, 1 << 30
_SEED = 7


@dataclass(frozen=True)
class Expected:
    """A new set of inputs, eager's result, and the float64 reference or the reason why there is
    none.
    """

    inputs: tuple[Any, ...]
    eager: Mapping[str, Tensor]
    exact: Reference | None
    why: str = ""


@dataclass(frozen=True)
class CheckOutcome:
    """`by`: "float64" or "eager", and then `why` not float64; `reason` is empty when it passed."""

    by: str
    reason: str
    error_ratio: float | None = None
    why: str = ""

    def worse(self, other: CheckOutcome) -> CheckOutcome:
        """Both checks as one: the first reason, the larger error."""
        errors = [value for value in (self.error_ratio, other.error_ratio) if value is not None]
        return CheckOutcome(
            self.by, self.reason or other.reason, max(errors, default=None), self.why
        )


def compute_expected(module: nn.Module, inputs: tuple[Any, ...]) -> Expected:
    """The result of `module` for `inputs`. Raises what eager raises."""
    runs = [_run_seeded(module, inputs)]
    if sum(tensor.nbytes for tensor in runs[0].values()) < _LARGE_BYTES:
        runs += [_run_seeded(module, inputs) for _ in range(_EAGER_RUNS - 1)]
    try:
        exact = _run_seeded(_copy_in_float64(module), pytree.tree_map(_to_float64, inputs))
        if list(exact) != list(runs[0]):
            return Expected(inputs, runs[0], None, "the float64 run has other outputs")
        if rights := contract_for(
            Settings()
        ).rights:  # all columns have them, whether or not cuDNN uses them here
            with Tf32OperandRounding(rights):
                runs.append(_run_seeded(module, inputs))
        return Expected(inputs, runs[0], make_reference(exact, runs))
    except (RuntimeError, TypeError, ValueError) as error:  # out of memory is a RuntimeError
        return Expected(
            inputs,
            runs[0],
            None,
            f"no float64 run: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
        )


def check_column(call: Call, expected: Expected, *, swapped: bool = True) -> CheckOutcome:
    """Call it on the fresh inputs and compare. Raises what the call raises.

    Where nothing was swapped in, one of PyTorch's baselines runs and is compared as a baseline is:
    within the precision that all columns have, cuDNN may take TF32 for a layout of Inductor's
    where it did not for eager's.
    """
    outputs = _run_seeded(call, expected.inputs)
    if expected.exact is None:
        return CheckOutcome("eager", find_gross_error(outputs, expected.eager), why=expected.why)
    if not swapped and not find_gross_error(outputs, expected.eager):
        return CheckOutcome("eager", "", why="nothing was swapped in")
    # where eager itself keeps no digits, being unlike it says nothing
    verdict = compare(outputs, expected.exact)
    return CheckOutcome("float64", verdict.reason, verdict.error_ratio)


def _copy_in_float64(module: nn.Module) -> nn.Module:
    """A copy, with the tensors in its plain attributes (`self.h0 = torch.randn(...)`), which
    `Module.double` leaves alone.
    """
    copied = copy_module(module).double()
    for part in copied.modules():
        vars(part).update(
            {
                name: _to_float64(value)
                for name, value in vars(part).items()
                if type(value) is Tensor
            }
        )
    return copied


def _run_seeded(call: Call, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    torch.manual_seed(_SEED)
    return copy_tensors(call(*inputs))


def _to_float64(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
