"""A cost model of a family of kernels: a random forest on the logarithm of time over lower bound.

It is used only where cross-validation shows that it orders the kernels of unseen fusion groups
better than the lower bound does; elsewhere the order of the bound stays. A prediction's spread is
the standard deviation over the trees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.kernels.features import KernelFeatures
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.forest import Forest, fit
from torch_cudal1.search.cost_model.timings import Config, KernelTiming

__all__ = ["CostModel", "Prediction", "fit_cost_model", "measure_rank_error"]

_MAX_TIMINGS = 2000  # the newest: more are fitted no better, and slower
_MIN_TIMINGS, _MIN_GROUPS = 24, 6  # below which no model is fitted
_MAX_ERROR_RATIO = 0.9  # of the bound's error in ordering kernels of fusion groups held out
_TIE_LOG2 = 0.02  # of a ratio of times below which their order does not count
_ABSENT_FEATURE = -1.0


@dataclass(frozen=True)
class Prediction:
    """Expected microseconds, and the factor by which the trees differ (1.0: not at all; infinite:
    no tree was fitted to such a kernel).
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
    """A forest that passed cross-validation. `columns` names its features; `errors`: pairwise rank
    errors of the model and of the bound on fusion groups held out.
    """

    family: str
    columns: tuple[str, ...]
    forest: Forest
    errors: tuple[float, float]

    def predict(self, features: KernelFeatures, proposals: Sequence[Proposal]) -> list[Prediction]:
        """The time of each proposal's kernel. A config with a word that was never measured gets its
        bound's time and an infinite factor.
        """
        # The model corrects the bound, so a prediction needs both.
        bounds_us = [features.lower_bound_us(proposal) for proposal in proposals]
        rows = [
            _name_features(features.sizes, proposal.config, bound_us)
            for proposal, bound_us in zip(proposals, bounds_us, strict=True)
        ]
        means, spreads = self.forest.predict(_tabulate(rows, self.columns))
        predictions = []
        for row, bound_us, mean, spread in zip(
            rows, bounds_us, means.tolist(), spreads.tolist(), strict=True
        ):
            # A word that no record has: a forest would take its kernel for a similar one.
            is_unseen = any("=" in name and name not in self.columns for name in row)
            factor = math.inf if is_unseen else 2**spread
            predictions.append(Prediction(bound_us * 2**mean, factor))
        return predictions


def fit_cost_model(timings: Sequence[KernelTiming], family: str) -> CostModel | Refusal:
    """The model of a family from its newest records, or why there is none."""
    # Families differ in their configs, and so in their columns.
    newest = [timing for timing in timings if timing.family == family][-_MAX_TIMINGS:]
    number_of = {
        group: number
        for number, group in enumerate(dict.fromkeys(timing.group for timing in newest))
    }
    if len(newest) < _MIN_TIMINGS or len(number_of) < _MIN_GROUPS:
        return Refusal(
            f"{len(newest)} timings of {len(number_of)} fusion groups; "
            f"a model takes {_MIN_TIMINGS} of {_MIN_GROUPS}"
        )
    named = [_name_features(timing.sizes, timing.config, timing.bound_us) for timing in newest]
    # Sorted, so that the same records give the same forest.
    columns = tuple(sorted({name for names in named for name in names}))
    rows = _tabulate(named, columns)
    groups = torch.tensor([number_of[timing.group] for timing in newest])
    values = torch.tensor(
        [math.log2(timing.us / timing.bound_us) for timing in newest], dtype=torch.float64
    )
    # On the ratio to the bound: sizes explain most of a time, and the bound has them already.
    forest = fit(rows, values, groups)
    logs = values + torch.tensor(
        [math.log2(timing.bound_us) for timing in newest], dtype=torch.float64
    )
    bounds = logs - values
    errors = (
        # Out of bag, so each fusion group is judged by trees that have not seen it.
        measure_rank_error(logs, bounds + forest.predict_out_of_bag(rows), groups),
        measure_rank_error(logs, bounds, groups),
    )
    # Timings of products on record: the order is better than the bound's in 3 of 7 cases, worse in
    # 2. The model has to prove itself on each machine.
    if errors[0] > _MAX_ERROR_RATIO * errors[1] or not errors[1]:
        return Refusal(
            f"on unseen fusion groups its order is off by {errors[0]:.3f}, "
            f"the bound's by {errors[1]:.3f}"
        )
    return CostModel(family, columns, forest, errors)


def measure_rank_error(times: Tensor, predictions: Tensor, groups: Tensor) -> float:
    """How wrong predictions are about the order within groups: the part of all pairwise differences
    (of logarithms) that they have the other way round.

    0.5 for a blind prediction, 0 for a right one.
    """
    wrong = total = 0.0
    for group in groups.unique():
        # Only within a group: a search never compares kernels of two.
        members = (groups == group) & ~predictions.isnan()
        gaps = times[members][:, None] - times[members]
        predicted_gaps = predictions[members][:, None] - predictions[members]
        # This also drops the negative half: each pair counts once.
        gaps = gaps.masked_fill(gaps < _TIE_LOG2, 0.0)
        wrong += float(
            # A tie in the prediction counts half, as a blind guess would.
            (gaps * (predicted_gaps < 0)).sum() + 0.5 * (gaps * (predicted_gaps == 0)).sum()
        )
        total += float(gaps.sum())
    return wrong / total if total else 0.0


def _name_features(sizes: Mapping[str, int], config: Config, bound_us: float) -> dict[str, float]:
    """Features by name: logarithms of numbers, words as flags."""
    features = {f"size {name}": math.log2(1 + value) for name, value in sizes.items()}
    # Logarithms, since ratios matter: 64 to 128 is as far as 2048 to 4096.
    features["bound"] = math.log2(bound_us)
    for name, value in config.items():
        if isinstance(value, str):
            # Words have no order, so each is a column.
            features[f"{name}={value}"] = 1.0
        else:
            features[name] = math.log2(1 + value)
    return features


def _tabulate(named: Sequence[Mapping[str, float]], columns: Sequence[str]) -> Tensor:
    rows = [[names.get(column, _ABSENT_FEATURE) for column in columns] for names in named]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(named), len(columns))
