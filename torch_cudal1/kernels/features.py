"""Features of a proposal for the cost model, before anything is measured: sizes of its fusion group,
and a lower bound on its time.

Sizes and counts only, from shapes: nothing of a tensor's content, no names. The cost model orders
proposals, not this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.ir.cost import DEVICE_RATES, estimate_cost
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels.expr.from_program import TracedProgram
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.registry import find_template, match_template

__all__ = ["KernelFeatures", "extract_features"]


@dataclass(frozen=True)
class KernelFeatures:
    """A fusion group's family, its `sizes` by name, and `region_bound_us`: the same rough bound for
    every proposal.
    """

    family: str
    sizes: Mapping[str, int]
    region_bound_us: float
    problem: Any = None

    def lower_bound_us(self, proposal: Proposal) -> float:
        """A bound on its time: the template's own where it has one, else the region's; infinite for
        nonsense.
        """
        template = find_template(self.family)
        if self.problem is None or template is None or template.problem is None:
            return self.region_bound_us
        try:
            bound_s = template.problem.lower_bound_s(self.problem, proposal)
        # Nonsense is ordered last, not refused: the cost model ranks whatever it is given.
        except (NotLowerableError, ProgramError):
            return math.inf
        return self.region_bound_us if bound_s is None else 1e6 * bound_s


def extract_features(program: Program) -> KernelFeatures | None:
    """The numbers of a fusion group's reference Program; None where the kernels do not cover it."""
    try:
        template, workload = match_template(program)
        traced = workload.trace
        model = template.problem
        problem = None if model is None else model.read(traced)
    except NotLowerableError:
        return None
    cost = estimate_cost(program)
    line = DEVICE_RATES["cuda"]
    # A roofline: the slower of computing and moving, and a launch.
    bound_s = max(cost.flops / line.flops_per_s, cost.min_bytes / line.bytes_per_s) + line.step_s
    sizes = {
        "steps": cost.steps,
        "bytes": cost.min_bytes,
        "element_bytes": traced.outputs[0].spec.torch_dtype.itemsize,
    }
    sizes |= _describe_leaves(traced) if model is None else model.sizes(problem)
    return KernelFeatures(traced.family, sizes, 1e6 * bound_s, problem)


def _describe_leaves(traced: TracedProgram) -> dict[str, int]:
    """Rows and columns of the largest tensor, for templates without a problem of their own."""
    # The largest tensor decides the time of a kernel that memory bounds.
    largest = max(traced.leaves.values(), key=lambda spec: spec.numel)
    return {
        "rows": math.prod(largest.shape[:-1]),
        "columns": largest.shape[-1] if largest.shape else 1,
    }
