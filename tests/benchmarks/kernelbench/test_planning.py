"""A plan of products: what the search would try, without a GPU, and why nothing where there is
nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kernelbench import planning
from benchmarks.kernelbench.__main__ import main
from benchmarks.kernelbench.tasks import Task

LINEAR = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.first, self.second = nn.Linear(inside, outside), nn.Linear(outside, outside)

    def forward(self, x):
        x = self.first(x)
        kept = x.clone().detach()
        return self.second(torch.relu(x * 0.5 + kept))

def get_inputs():
    return [torch.rand(2048, 1024)]

def get_init_inputs():
    return [1024, 4096]
"""


def make_task(source: str = LINEAR) -> Task:
    return Task(2, 7, "Two_layers", source, "today")


def test_products_are_found_with_what_follows_them_and_several_kernels_each() -> None:
    first, second = planning.plan_products(make_task())
    # a copy and a detach are no border
    assert (first.sizes, first.tail) == (
        "2048 x 4096 x 1024",
        ("mul", "add", "relu"),
    )
    assert (second.sizes, second.tail) == ("2048 x 4096 x 4096", ())
    for plan in (first, second):
        methods = {label.split()[0] for label, _ in plan.proposals}
        assert {"packed-f16x3", "packed-stream"} <= methods
        assert plan.proposals[0][1] < plan.plain_us


def test_what_another_architecture_has_no_kernel_for_is_not_proposed() -> None:
    assert all(
        not label.startswith("packed")
        for plan in planning.plan_products(make_task(), sm=80)
        for label, _ in plan.proposals
    )


def test_a_task_that_cannot_be_captured_says_why() -> None:
    (plan,) = planning.plan_products(
        make_task(LINEAR.replace("torch.relu(", "(1 / len(str(x.item()))) * ("))
    )
    assert plan.reason.startswith("not captured")
    assert "not captured" in planning.format_plan([plan])


SINGLE = LINEAR.replace("self.second(torch.relu(x * 0.5 + kept))", "x").replace(
    "x = self.first(x)", "x = x.relu()"
)


@pytest.mark.parametrize(
    ("source", "families", "reason"),
    [
        (LINEAR, {"gemm", "elementwise"}, ""),
        (
            SINGLE.replace("kept = x.clone().detach()", ""),
            set(),
            "aten.relu.default: alone, nothing to fuse with",
        ),
        (LINEAR.replace("torch.relu(", "(1 / len(str(x.item()))) * ("), set(), "not captured"),
    ],
    ids=["products", "nothing", "not captured"],
)
def test_coverage_lists_what_there_is_or_why_nothing(
    source: str, families: set[str], reason: str
) -> None:
    coverage = planning.find_coverage(make_task(source))
    assert {name for name, _ in coverage.families} == families
    assert coverage.left.startswith(reason)
    assert bool(coverage.left) == bool(reason)
    assert planning.format_coverage([coverage]).endswith(
        f"{int(bool(reason))} of 1 have nothing beyond baselines"
    )


def test_the_command_line_prints_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "level2"
    folder.mkdir()
    (folder / "7_Two_layers.py").write_text(LINEAR)
    assert main(["plan", str(tmp_path), "--json"]) == 0
    assert [plan["task"] for plan in json.loads(capsys.readouterr().out)] == ["2/7", "2/7"]
