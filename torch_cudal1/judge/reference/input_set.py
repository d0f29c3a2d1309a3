"""One input set of a candidate and what the reference yields on it, computed at first use.

It is made and kept by `trial`; it judges nothing and talks to no child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.reference.float64 import measure_input_sensitivity
from torch_cudal1.judge.reference.region_reference import Outputs, Result

__all__ = ["InputSet", "ReferenceCache"]

_COMPUTED = ("expected", "exact", "sensitivity")  # cached properties of a set


@dataclass
class InputSet:
    """One input set: the tensors in this process, and the reference's outputs (computed at first
    use).

    `is_shared`: all candidates of the region run on this set, so what was computed for one stays
    for the next; `shared_results`: results of checks on sets of its kind that do not depend on the
    candidate.
    """

    name: str
    distribution: str
    inputs: list[torch.Tensor]
    eager: Callable[[Sequence[torch.Tensor]], Result] = field(repr=False)
    oracle: Callable[[Sequence[torch.Tensor]], Outputs | Refusal] = field(repr=False)
    is_shared: bool = False
    shared_results: dict[tuple[str, ...], list[CheckResult]] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def expected(self) -> Result:
        """Eager's outputs and their properties. Raises ReferenceFailure when eager refuses the
        inputs.
        """
        return self.eager(self.inputs)

    @cached_property
    def exact(self) -> Outputs | Refusal:
        """The float64 outputs."""
        return self.oracle(self.inputs)

    @property
    def has_exact(self) -> bool:
        """Whether the float64 outputs were computed already, so that asking for them is free."""
        # A cached property is in `__dict__` once it was computed.
        return "exact" in self.__dict__

    @property
    def computed_exact(self) -> Outputs | Refusal | None:
        """The float64 outputs, where they were computed already."""
        return self.__dict__.get("exact")

    def get_exact(self, position: int) -> torch.Tensor | None:
        """The float64 value of one output, None where there is none."""
        return None if isinstance(self.exact, Refusal) else self.exact[position]

    @cached_property
    def sensitivity(self) -> list[torch.Tensor | None]:
        """How far the float64 outputs move with the inputs: what tells a sum that cancels from one
        that is wrong.
        """
        return (
            []
            if isinstance(self.exact, Refusal)
            else measure_input_sensitivity(self.oracle, self.inputs, self.exact)
        )

    def get_sensitivity(self, position: int) -> torch.Tensor | None:
        """How far one output moves, None where that cannot be told."""
        return self.sensitivity[position] if self.sensitivity else None

    def copy_expected(self, other: InputSet) -> None:
        """Take over the reference's outputs from another set of the same values at other
        addresses.
        """
        # Written where the cached properties look, so that none is computed again.
        self.__dict__ |= {
            name: other.__dict__[name] for name in _COMPUTED if name in other.__dict__
        }

    def tensors(self) -> Iterator[torch.Tensor]:
        """Of its inputs, and of what was computed on them so far."""
        yield from self.inputs
        expected, exact, moved = (self.__dict__.get(name) for name in _COMPUTED)
        for outputs in (
            expected.outputs if expected else (),
            exact if isinstance(exact, list) else (),
            moved or (),
        ):
            yield from (tensor for tensor in outputs if tensor is not None)

    def rerun_eager(self) -> Iterator[Result]:
        """Four more runs of eager, one after the other: it may vary."""
        # Atomics and the choice of algorithms may give other bits in each run.
        for _ in range(4):
            # One at a time: five results of a large region at once may not fit into memory.
            yield self.eager(self.inputs)

    def forget_computed(self) -> None:
        """Free all computed results; they are computed again at the next use."""
        for name in _COMPUTED:
            self.__dict__.pop(name, None)

    def forget_exact(self) -> None:
        """Free what is float64, unless another candidate will need it."""
        # The next candidate would compute it again.
        if not self.is_shared:
            for name in ("exact", "sensitivity"):
                self.__dict__.pop(name, None)


ReferenceCache: TypeAlias = dict[
    tuple[str, str, int], InputSet
]  # (region key, distribution, n-th of it)
