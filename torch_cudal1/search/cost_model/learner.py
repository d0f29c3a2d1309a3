"""What one search knows of earlier timings, and adds to them: the file is read when first asked, a
family's model is made once.

A model is made anew when its family has got new timings, so later islands of a search learn from
earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch_cudal1 import kernels
from torch_cudal1.core import telemetry
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels.features import island_of
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.predictor import CostModel, Unknown, learn
from torch_cudal1.search.cost_model.timings import Timing, add, read, timing_of
from torch_cudal1.search.evolution.expected_order import chosen
from torch_cudal1.search.evolution.generation import next_generation
from torch_cudal1.search.evolution.mutators import legal
from torch_cudal1.store.cache.files import NotStored

__all__ = ["Learner"]

_WIDE = 24  # proposals of a family that a model looks at; without one its own first ones are taken


@dataclass
class Learner:
    """The timings in the file `path`, for islands on `sm` whose products may use what `rights` say."""

    path: Path
    sm: int
    rights: Collection[str]
    _timings: list[Timing] | None = None
    _models: dict[str, CostModel | Unknown] = field(default_factory=dict)

    def model(self, family: str) -> CostModel | Unknown:
        """The cost model of a family, or why there is none."""
        if self._timings is None:
            self._timings = read(self.path)
        if family not in self._models:
            self._models[family] = model = learn(self._timings, family)
            told = (
                {"why_not": model.reason}
                if isinstance(model, Unknown)
                else {"errors": model.errors}
            )
            telemetry.record("search", "cost_model", family, **told)
        return self._models[family]

    def chosen(
        self, program: Program, found: tuple[Proposal, ...], count: int
    ) -> tuple[Proposal, ...]:
        """At most `count` proposals for an island's `program`; `found` are its family's first ones,
        which stand without a model.
        """
        model = self.model(found[0].family) if found else Unknown("no kernel serves here")
        island = None if isinstance(model, Unknown) else island_of(program)
        if island is None:
            return found[:count]
        return chosen(
            kernels.propose(program, self.sm, self.rights, most=_WIDE), island, model, count
        )

    def note(self, program: Program, us: Mapping[Proposal, float]) -> None:
        """Keep what a race has measured of an island's kernels."""
        island = island_of(program)
        if island is None or not us:
            return
        fresh = [
            timing_of(island, proposal, one)
            for proposal, one in us.items()
            if island.bound_us(proposal) < float("inf")
        ]
        self._timings = [*(self._timings if self._timings is not None else read(self.path)), *fresh]
        self._models.pop(island.family, None)
        if isinstance(kept := add(self.path, fresh), NotStored):
            telemetry.record("search", "timings_not_kept", island.family, reason=kept.reason)

    def children(
        self,
        program: Program,
        us: Mapping[Proposal, float],
        failed: Collection[Proposal],
        count: int,
    ) -> tuple[Proposal, ...]:
        """At most `count` of the next generation of an island's kernels; () where none is hoped
        for.
        """
        family = next((one.family for one in us), "")
        model = self.model(family)
        island = None if isinstance(model, Unknown) else island_of(program)
        if island is None:
            return ()
        own = kernels.propose(program, self.sm, self.rights, most=_WIDE)
        return next_generation(
            us,
            own,
            lambda some: legal(program, some, self.sm),
            island,
            model,
            count=count,
            failed=failed,
            seed=len(us) + len(failed),
        )
