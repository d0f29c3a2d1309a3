"""A cost model of a family of kernels: a forest on the logarithm of time over bound, and whether it
is to be believed.

It is believed only where it orders kernels of islands it has not seen better than the bound does,
on the very records it was made from: a machine on which it does not help keeps the order of the
bound. Times come out with a spread, which is that of its trees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cudal1.kernels.features import Island
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.forest import Forest, fit
from torch_cudal1.search.cost_model.timings import Config, Timing

__all__ = ["CostModel", "Guess", "Unknown", "learn"]

_MOST = 2000  # newest records: more are fitted no better, and slower
_LEAST, _ISLANDS = 24, 6  # records and islands, below which nothing is claimed
_BETTER = 0.9  # of the bound's error in ordering unseen islands' kernels
_SAME = 0.02  # log2 of a ratio of times below which an order is no matter
_ABSENT = -1.0


@dataclass(frozen=True)
class Unknown:
    """No model, and why."""

    reason: str


@dataclass(frozen=True)
class Guess:
    """Expected microseconds, and the factor by which the trees differ (1.0: not at all; infinite:
    no tree knows such a kernel).
    """

    us: float
    factor: float

    @property
    def low_us(self) -> float:
        """Two standard deviations faster."""
        return self.us / self.factor**2

    @property
    def high_us(self) -> float:
        """Two standard deviations slower."""
        return self.us * self.factor**2


@dataclass(frozen=True)
class CostModel:
    """A believed forest. `columns` names its features; `errors`: of the model and of the bound on
    unseen islands.
    """

    family: str
    columns: tuple[str, ...]
    forest: Forest
    errors: tuple[float, float]

    def guess(self, island: Island, proposals: Sequence[Proposal]) -> list[Guess]:
        """For each proposal. One with a word that was never measured has its bound's time and an
        infinite factor.
        """
        bounds = [island.bound_us(one) for one in proposals]
        named = [
            _named(island.sizes, one.config, bound)
            for one, bound in zip(proposals, bounds, strict=True)
        ]
        means, spreads = self.forest.predict(_table(named, self.columns))
        found = []
        for names, bound, mean, spread in zip(
            named, bounds, means.tolist(), spreads.tolist(), strict=True
        ):
            strange = any("=" in name and name not in self.columns for name in names)
            found.append(Guess(bound * 2**mean, math.inf if strange else 2**spread))
        return found


def learn(timings: Sequence[Timing], family: str) -> CostModel | Unknown:
    """The model of a family from its newest records, or why there is none."""
    known = [one for one in timings if one.family == family][-_MOST:]
    islands = {
        island: number for number, island in enumerate(dict.fromkeys(one.island for one in known))
    }
    if len(known) < _LEAST or len(islands) < _ISLANDS:
        return Unknown(
            f"{len(known)} timings of {len(islands)} islands; a model takes {_LEAST} of {_ISLANDS}"
        )
    named = [_named(one.sizes, one.config, one.bound_us) for one in known]
    columns = tuple(sorted({name for names in named for name in names}))
    rows, groups = _table(named, columns), torch.tensor([islands[one.island] for one in known])
    values = torch.tensor([math.log2(one.us / one.bound_us) for one in known], dtype=torch.float64)
    forest = fit(rows, values, groups)
    logs = values + torch.tensor([math.log2(one.bound_us) for one in known], dtype=torch.float64)
    bounds = logs - values
    errors = disorder(logs, bounds + forest.held_out(rows), groups), disorder(logs, bounds, groups)
    if errors[0] > _BETTER * errors[1] or not errors[1]:
        return Unknown(
            f"on unseen islands its order is off by {errors[0]:.3f}, the bound's by {errors[1]:.3f}"
        )
    return CostModel(family, columns, forest, errors)


def disorder(times: Tensor, guesses: Tensor, groups: Tensor) -> float:
    """How much a guess is wrong about the order within groups: the part of all differences
    (logarithms) that it has the other way.

    Half of them for one that guesses blindly, 0 for one that is right.
    """
    wrong = total = 0.0
    for group in groups.unique():
        own = (groups == group) & ~guesses.isnan()
        apart = times[own][:, None] - times[own]
        ahead = guesses[own][:, None] - guesses[own]
        apart = apart.masked_fill(apart < _SAME, 0.0)
        wrong += float((apart * (ahead < 0)).sum() + 0.5 * (apart * (ahead == 0)).sum())
        total += float(apart.sum())
    return wrong / total if total else 0.0


def _named(sizes: Mapping[str, int], config: Config, bound_us: float) -> dict[str, float]:
    """Features by name: logarithms of numbers, words as flags."""
    found = {f"size {name}": math.log2(1 + value) for name, value in sizes.items()} | {
        "bound": math.log2(bound_us)
    }
    for name, value in config.items():
        if isinstance(value, str):
            found[f"{name}={value}"] = 1.0
        else:
            found[name] = math.log2(1 + value)
    return found


def _table(named: Sequence[Mapping[str, float]], columns: Sequence[str]) -> Tensor:
    rows = [[names.get(column, _ABSENT) for column in columns] for names in named]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(named), len(columns))
