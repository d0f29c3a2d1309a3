"""A task's file becomes a module with inputs, and its memory is estimated without making a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kernelbench.loading import (
    estimate_demand,
    make_inputs,
    make_module,
)
from tests.benchmarks.kernelbench.examples import CPU, DIAGONAL, load_source


def test_weights_are_the_same_every_time_and_inputs_only_for_one_seed(tmp_path: Path) -> None:
    source = DIAGONAL.replace(
        "def forward(self, a, b):\n        return",
        "def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 4)\n    def forward(self, a, b):\n        return",
    )
    task = load_source(tmp_path, source)
    first, second = (make_module(task, CPU, "eval") for _ in range(2))
    assert torch.equal(first.layer.weight, second.layer.weight)  # type: ignore[union-attr, arg-type]
    assert (first.training, make_module(task, CPU, "train").training) == (False, True)
    assert torch.equal(make_inputs(task, CPU, 1)[0], make_inputs(task, CPU, 1)[0])
    assert not torch.equal(make_inputs(task, CPU, 1)[0], make_inputs(task, CPU, 2)[0])


def test_demand_is_estimated_without_making_a_tensor(tmp_path: Path) -> None:
    # 1 GB of inputs, a diagonal matrix of 4 TB
    large = estimate_demand(load_source(tmp_path, DIAGONAL.replace("512", "1_000_000")), "eval")
    assert large is not None
    assert 4e12 < large.memory_bytes < 5e12
    small = estimate_demand(load_source(tmp_path), "eval")
    assert small is not None
    # inputs, the diagonal matrix, the result
    assert small.memory_bytes == 4 * (512 + 512 * 256 + 512 * 512 + 512 * 256)
    assert small.least_bytes == 4 * (512 + 512 * 256 + 512 * 256)
    assert small.flops == 2 * 512 * 512 * 256
    assert (small.given_bytes, small.result_bytes) == (4 * (512 + 512 * 256), 4 * 512 * 256)


def test_a_task_that_needs_values_has_no_estimate(tmp_path: Path) -> None:
    assert (
        estimate_demand(
            load_source(tmp_path, DIAGONAL.replace("torch.diag(a) @ b", "b if a.tolist() else a")),
            "eval",
        )
        is None
    )


def test_a_constructor_that_needs_values_has_one(tmp_path: Path) -> None:
    """As that of a Swin transformer, which reads its rates of stochastic depth from a tensor."""
    constructor = "    def __init__(self):\n        super().__init__()\n        self.rate = torch.linspace(0, 1, 3)[1].item()\n"
    estimate = estimate_demand(
        load_source(tmp_path, DIAGONAL.replace("    def forward", constructor + "    def forward")),
        "eval",
    )
    assert estimate is not None
    assert estimate == estimate_demand(load_source(tmp_path), "eval")


def test_a_file_without_the_three_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="defines no get_inputs"):
        load_source(tmp_path, DIAGONAL.replace("get_inputs", "get_stuff"))
