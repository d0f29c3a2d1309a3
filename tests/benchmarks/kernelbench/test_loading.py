"""A task's file becomes a module with inputs, and its memory is estimated without making a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kernelbench.loading import (
    TaskSource,
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


def test_weights_and_inputs_of_another_dtype_are_the_same_numbers_rounded(tmp_path: Path) -> None:
    text = DIAGONAL.replace(
        "def forward(self, a, b):\n        return",
        "def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 4)\n    def forward(self, a, b):\n        return",
    ).replace("def get_inputs():", "def get_inputs():\n    # a draw ahead of the others")
    plain = load_source(tmp_path, text)
    half = TaskSource(plain.source, torch.bfloat16)
    weights = [make_module(task, CPU, "eval").layer.weight for task in (plain, half)]
    assert torch.equal(weights[1], weights[0].bfloat16())  # type: ignore[operator, arg-type]
    inputs = [make_inputs(task, CPU, 1) for task in (plain, half)]
    assert {tensor.dtype for tensor in inputs[1]} == {torch.bfloat16}
    assert all(torch.equal(b, a.bfloat16()) for a, b in zip(*inputs, strict=True))
    demands = [estimate_demand(task, "eval") for task in (plain, half)]
    assert demands[0] is not None
    assert demands[1] is not None
    assert demands[1].least_bytes * 2 == demands[0].least_bytes


def test_whole_numbers_keep_their_dtype(tmp_path: Path) -> None:
    source = load_source(tmp_path).source
    source.get_inputs = lambda: [torch.tensor([3]), 2, torch.ones(1)]
    index, number, value = TaskSource(source, torch.bfloat16).inputs()
    assert (index.dtype, number, value.dtype) == (torch.int64, 2, torch.bfloat16)


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
