"""A random forest for regression, small enough to be fitted during a search: all trees grow
together, level by level.

Each tree is fitted to whole groups of rows (fusion groups), drawn with repetition. Rows of one
fusion group resemble each other, so only trees without that group predict it without bias
(`predict_out_of_bag`). Splits are at quantiles, each level of a tree tries half of the features,
and a leaf's mean is shrunk towards its parent's. The same rows give the same forest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Forest", "fit"]

# Small, since a search fits a model for each family and again after new timings.
_TREES, _DEPTH, _BINS = 24, 6, 24
# A leaf of a single row repeats its noise.
_MIN_LEAF_WEIGHT = 2.0  # rows of a leaf, repetitions counted
_PARENT_WEIGHT = 1.0  # rows that the parent's mean counts as


@dataclass(frozen=True)
class Forest:
    """Tests by level, (trees, nodes of the level): a row goes right where column `features` is
    above `cuts`; (trees, leaves) means.

    `seen`: (trees, rows) whether a tree was grown from a row.
    """

    features: tuple[Tensor, ...]
    cuts: tuple[Tensor, ...]
    leaves: Tensor
    # Kept for `predict_out_of_bag`, by which a model is believed or not.
    seen: Tensor

    def predict(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation over the trees, for each of (rows, columns)."""
        predictions = self._predict_by_tree(rows)
        return predictions.mean(0), predictions.std(0)

    def predict_out_of_bag(self, rows: Tensor) -> Tensor:
        """For the rows it was fitted to: the mean over trees that have not seen a row's group; NaN
        where all have.
        """
        # Whole groups were drawn, so a tree that has not seen a row has seen none of its fusion
        # group.
        is_out_of_bag = (~self.seen).to(rows.dtype)
        # 0 / 0 is the NaN of a row that every tree has seen.
        return (self._predict_by_tree(rows) * is_out_of_bag).sum(0) / is_out_of_bag.sum(0)

    def _predict_by_tree(self, rows: Tensor) -> Tensor:
        node = torch.zeros(len(self.leaves), len(rows), dtype=torch.long)
        for features, cuts in zip(self.features, self.cuts, strict=True):
            node = _descend(rows, node, features, cuts)
        return self.leaves.gather(1, node)


def fit(rows: Tensor, values: Tensor, groups: Tensor, *, seed: int = 0) -> Forest:
    """Grow a forest on (rows, columns) of float64 and their values; `groups` numbers each row's
    group, from 0.
    """
    # A generator of its own: a search must not move the user's random numbers, and the same rows
    # give the same forest.
    dice = torch.Generator().manual_seed(seed)
    count = int(groups.max()) + 1
    # With repetition, as a bootstrap draws; a group drawn twice weighs twice.
    drawn = torch.randint(count, (_TREES, count), generator=dice)
    weights = torch.zeros(_TREES, count, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )
    weights = weights[:, groups]
    # Quantiles instead of equal steps: sizes of fusion groups are spread over powers of two.
    edges = torch.quantile(
        rows,
        torch.linspace(0, 1, _BINS + 1, dtype=torch.float64)[1:-1],
        dim=0,
        # An edge is then a value that occurs, and equal values fall on one side of it.
        interpolation="lower",
    ).T
    # A bin is the number of edges below the value.
    bins = torch.searchsorted(edges.contiguous(), rows.T.contiguous()).T
    node = torch.zeros(_TREES, len(rows), dtype=torch.long)
    features, cuts = [], []
    means = _compute_node_means(
        # The root has no parent: a prior of nearly nothing only avoids 0 / 0.
        node,
        weights,
        values,
        1,
        torch.zeros(_TREES, 1, dtype=torch.float64),
        prior=1e-9,
    )
    # All trees at once, since a Python loop over trees and nodes would be slow.
    for level in range(_DEPTH):
        feature, cut = _choose_splits(bins, node, weights, values, 1 << level, dice)
        features.append(feature)
        cuts.append(
            # A cut at infinity sends every row to the left: the node is not split.
            torch.where(cut < _BINS - 1, edges[feature, cut.clamp(max=_BINS - 2)], torch.inf)
        )
        node = _descend(rows, node, features[-1], cuts[-1])
        means = _compute_node_means(
            node, weights, values, 2 << level, means.repeat_interleave(2, 1)
        )
    return Forest(tuple(features), tuple(cuts), means, weights > 0)


def _descend(rows: Tensor, node: Tensor, features: Tensor, cuts: Tensor) -> Tensor:
    """The nodes of the next level: (trees, rows)."""
    values = rows.T.gather(0, features.gather(1, node)) if rows.shape[1] else torch.zeros_like(node)
    return 2 * node + (values > cuts.gather(1, node))


def _compute_node_means(
    node: Tensor,
    weights: Tensor,
    values: Tensor,
    nodes: int,
    parents: Tensor,
    *,
    prior: float = _PARENT_WEIGHT,
) -> Tensor:
    """Of each node, with the parent's mean as so many rows more: one that is empty has its
    parent's.
    """
    empty = torch.zeros(len(node), nodes, dtype=torch.float64)
    size, total = empty.scatter_add(1, node, weights), empty.scatter_add(1, node, weights * values)
    return (total + prior * parents) / (size + prior)


def _choose_splits(
    bins: Tensor, node: Tensor, weights: Tensor, values: Tensor, nodes: int, dice: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Column and bin of each node's test, (trees, nodes): those whose two sides have the least
    variance. No bin: none is useful.
    """
    trees, columns = len(node), bins.shape[1]
    # Half of the columns, so that trees differ and their spread means something.
    features = torch.rand(trees, columns, generator=dice).argsort(1)[:, : (columns + 1) // 2]
    offsets = (torch.arange(trees)[:, None] * nodes + node)[:, None, :] * (
        features.shape[1] * _BINS
    )
    bins_of_rows = (
        offsets + torch.arange(features.shape[1])[:, None] * _BINS + bins.T[features]
    ).flatten()

    def sum_below(amount: Tensor) -> Tensor:
        """Sums over the rows of a node up to each bin: (trees, nodes, columns tried, bins)."""
        amounts = amount[:, None, :].expand(-1, features.shape[1], -1).flatten()
        total = torch.bincount(bins_of_rows, amounts, trees * nodes * features.shape[1] * _BINS)
        return total.view(trees, nodes, -1, _BINS).cumsum(3)

    size, total = sum_below(weights), sum_below(weights * values)
    other_size, other_total = size[..., -1:] - size, total[..., -1:] - total
    # Least variance within the sides is most squared sum over size.
    gain = (
        total**2 / size.clamp(min=1e-9)
        + other_total**2 / other_size.clamp(min=1e-9)
        - total[..., -1:] ** 2 / size[..., -1:].clamp(min=1e-9)
    )
    best, at = (
        # Sides with too little weight are no leaves.
        gain.masked_fill((size < _MIN_LEAF_WEIGHT) | (other_size < _MIN_LEAF_WEIGHT), 0.0)
        .flatten(2)
        .max(2)
    )
    column, cut = features.gather(1, at // _BINS), at % _BINS
    # Rounding alone makes gains of that size. The last bin has no edge, so it means no split.
    return column, cut.masked_fill(best <= 1e-12, _BINS - 1)
