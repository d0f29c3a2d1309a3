"""What a model's call has to do at least, and how long that takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.real_models.floors import (
    DeviceRates,
    ModelWork,
    count_model_work,
    find_floor_us,
    measure_rates,
)


class LanguageModel(nn.Module):
    """A table of words, and a head of its own or the table itself."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.table(ids))}


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_table_counts_where_a_product_reads_it(is_tied: bool) -> None:
    ids = torch.zeros(1, 3, dtype=torch.int64)
    work = count_model_work(LanguageModel(is_tied=is_tied), (ids,), {})
    head, logits, words = 100 * 8 * 4, 3 * 100 * 4, 3 * 8
    assert work == ModelWork(2 * 3 * 8 * 100, head + logits + words)


def test_arguments_by_name_and_buffers_are_moved_too() -> None:
    norm = nn.BatchNorm1d(4).eval()
    work = count_model_work(norm, (), {"input": torch.ones(2, 4)})
    # Weight, bias, mean and variance, a number of batches, the input and the result.
    assert work == ModelWork(0.0, 4 * 16 + 8 + 2 * 32)


def test_the_floor_is_the_longer_of_products_and_bytes() -> None:
    rates = DeviceRates(flops_per_s=1e12, bytes_per_s=1e9)
    assert find_floor_us(ModelWork(2e6, 1_000), rates) == pytest.approx(2.0)
    assert find_floor_us(ModelWork(2e6, 5_000), rates) == pytest.approx(5.0)


def test_rates_are_positive() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert rates.flops_per_s > 0
    assert rates.bytes_per_s > 0
