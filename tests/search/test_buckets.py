"""Contrastive sampling draws from distinct buckets of similar scores, good ones more often."""

from __future__ import annotations

import random

from torch_cudal1.search.evolution.buckets import draw_contrasting


def test_parents_come_from_distinct_buckets_and_the_fast_ones_more_often() -> None:
    scores = [1.0, 1.001, 4.0, 4.004, 16.0]
    draws = [draw_contrasting(scores, random.Random(seed)) for seed in range(300)]
    assert all(len(positions) == 2 for positions in draws)
    assert not any(set(positions) in ({0, 1}, {2, 3}) for positions in draws)
    assert sum(4 in positions for positions in draws) > sum(
        0 in positions or 1 in positions for positions in draws
    )
    assert draw_contrasting([2.0, 2.0, 2.0], random.Random(0)) in ([0], [1], [2])
