"""A forest of regression trees: the same one every time, honest about rows it has not seen, and quickly
fitted.
"""

from __future__ import annotations

import time

import torch

from torch_cudal1.search.cost_model.forest import fit


def test_a_forest_finds_steps_and_products_and_the_same_ones_every_time() -> None:
    dice = torch.Generator().manual_seed(1)
    rows = torch.rand(600, 6, dtype=torch.float64, generator=dice)
    values = 2 * (rows[:, 0] > 0.5) + rows[:, 1] * rows[:, 2]
    groups = torch.arange(600) // 6
    forest = fit(rows, values, groups)
    again = fit(rows, values, groups)
    residuals = values - forest.predict_out_of_bag(rows)
    assert residuals[~residuals.isnan()].std() < 0.3 * values.std()
    assert torch.equal(forest.leaves, again.leaves)
    assert all(
        torch.equal(cut, other_cut) for cut, other_cut in zip(forest.cuts, again.cuts, strict=True)
    )


def test_what_is_held_out_was_not_seen() -> None:
    """Each group has its own value, which its rows tell: whoever has seen it knows it, whoever has
    not cannot.
    """
    groups = torch.arange(40).repeat_interleave(5)
    codes = torch.rand(40, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    values = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(3))[
        groups
    ]
    forest = fit(codes[groups], values, groups)
    predicted, _ = forest.predict(codes[groups])
    assert (predicted - values).abs().mean() < 0.75 * (
        forest.predict_out_of_bag(codes[groups]) - values
    ).nan_to_num().abs().mean()


def test_a_forest_of_thousands_of_rows_is_fitted_in_tenths_of_a_second() -> None:
    rows = torch.rand(3000, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spent = []
        for _ in range(3):
            started_s = time.process_time()
            forest = fit(rows, rows[:, 0], torch.arange(3000) // 6)
            spent.append(time.process_time() - started_s)
        started_s = time.process_time()
        forest.predict(rows)
        asked_s = time.process_time() - started_s
    finally:
        torch.set_num_threads(threads)
    assert min(spent) < 1.0  # 0.15 s on two quiet cores; this machine may be anything
    assert asked_s < 0.5
