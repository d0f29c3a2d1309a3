"""Chooses which kernels a search compiles, by a cost model of this machine's timings.

The file of timings is read at the first question. A family's model is fitted once, and again after
new timings of that family: later fusion groups of a search learn from earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch_cudal1 import kernels
from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels.features import extract_features
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.predictor import CostModel, fit_cost_model
from torch_cudal1.search.cost_model.timings import (
    KernelTiming,
    append_timings,
    make_timing,
    read_timings,
)
from torch_cudal1.search.evolution.expected_order import select_proposals
from torch_cudal1.search.evolution.generation import propose_generation
from torch_cudal1.search.evolution.mutators import filter_legal

__all__ = ["Learner"]

# proposals of a family that a model ranks; without a model its first ones are taken
# Predicting is cheap and compiling is not, so the model sees more than will be built.
_MAX_RANKED_PROPOSALS = 24


@dataclass
class Learner:
    """The timings in the file `path` and the models fitted to them, for fusion groups on `sm`;
    `rights` as for `kernels.propose`.
    """

    path: Path
    sm: int
    rights: Collection[str]
    # None: not read yet. A search without kernels never reads the file.
    _timings: list[KernelTiming] | None = None
    _models: dict[str, CostModel | Refusal] = field(default_factory=dict)

    def get_model(self, family: str) -> CostModel | Refusal:
        """The cost model of a family, or why there is none."""
        if self._timings is None:
            self._timings = read_timings(self.path)
        if family not in self._models:
            self._models[family] = model = fit_cost_model(self._timings, family)
            details = (
                {"why_not": model.reason}
                if isinstance(model, Refusal)
                else {"errors": model.errors}
            )
            # Once a fit, so that a report shows whether the model was believed.
            telemetry.record("search", "cost_model", family, **details)
        return self._models[family]

    def select_proposals(
        self, program: Program, first: tuple[Proposal, ...], count: int
    ) -> tuple[Proposal, ...]:
        """At most `count` proposals for a fusion group's `program`. `first`: the first ones of its
        family, which are taken without a model.
        """
        model = self.get_model(first[0].family) if first else Refusal("no kernel serves here")
        features = None if isinstance(model, Refusal) else extract_features(program)
        if features is None:
            return first[:count]
        ranked = kernels.propose(program, self.sm, self.rights, most=_MAX_RANKED_PROPOSALS)
        return select_proposals(ranked, features, model, count)

    def record_times(self, program: Program, times_us: Mapping[Proposal, float]) -> None:
        """Store the microseconds of a fusion group's kernels."""
        features = extract_features(program)
        if features is None or not times_us:
            return
        added = [
            make_timing(features, proposal, us)
            for proposal, us in times_us.items()
            # An infinite bound means that the formula does not fit the config.
            if features.lower_bound_us(proposal) < float("inf")
        ]
        # Before the append, or the new lines would be read back and counted twice.
        before = self._timings if self._timings is not None else read_timings(self.path)
        self._timings = [*before, *added]
        # Later fusion groups of this search learn from these timings.
        self._models.pop(features.family, None)
        # A timing that is not kept costs the next search a guess, and this one nothing.
        if isinstance(stored := append_timings(self.path, added), Refusal):
            telemetry.record("search", "timings_not_kept", features.family, reason=stored.reason)

    def propose_children(
        self,
        program: Program,
        times_us: Mapping[Proposal, float],
        failed: Collection[Proposal],
        count: int,
    ) -> tuple[Proposal, ...]:
        """At most `count` of the next generation of a fusion group's kernels; () where the cost
        model expects no gain.
        """
        family = next((proposal.family for proposal in times_us), "")
        model = self.get_model(family)
        features = None if isinstance(model, Refusal) else extract_features(program)
        if features is None:
            return ()
        return propose_generation(
            times_us,
            kernels.propose(program, self.sm, self.rights, most=_MAX_RANKED_PROPOSALS),
            lambda proposals: filter_legal(program, proposals, self.sm),
            features,
            model,
            count=count,
            failed=failed,
            # A seed of the state: the same search draws the same children.
            seed=len(times_us) + len(failed),
        )
