"""Both doors run a deep model as its blocks were decided, and only where the composed whole computes
what the module does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cudal1
from tests.entries import Change, add_one_to_output, plant_regions, same
from tests.ir.stacks import ROWS, WIDTH, capture_region, make_stack
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.blocks import partition_blocks
from torch_cudal1.ir.records import Region
from torch_cudal1.search import by_blocks

X = torch.randn(ROWS, WIDTH)


@pytest.fixture(autouse=True)
def small_models_are_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_blocks, "MIN_COPIED_STEPS", 10)
    telemetry.reset()


def plant_block(cache_dir: Path, change: Change = same) -> None:
    """What a search would have left for the layer that `make_stack` repeats."""
    (block,) = partition_blocks(capture_region(make_stack(4), X).program).blocks
    roles = tuple("input" for _ in block.program.inputs)
    plant_regions([Region(block.program, roles, "inference", "block")], cache_dir, change)


@pytest.fixture
def composed_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end-to-end measurement finds the composed whole faster."""
    monkeypatch.setattr(
        "torch_cudal1.api.module_trial.select_faster",
        lambda contenders, *arguments, **how: ([], ["cudal1"]),
    )


@pytest.mark.usefixtures("composed_wins")
@pytest.mark.parametrize("layers", [6, 9])
def test_a_block_decided_in_one_model_serves_another(layers: int, tmp_path: Path) -> None:
    plant_block(tmp_path)
    module = make_stack(layers)
    with torch.no_grad():
        expected = module(X)
        cudal1.accelerate(module, X, cache_dir=tmp_path, on_miss="tune", strictness="error")
        torch.testing.assert_close(module(X), expected)
    (report,) = cudal1.explain(module).regions
    assert (report.granularity, report.origin, report.schedule) == ("whole", "blocks", "regional")
    assert f"decided by its blocks, each searched for once: {layers - 1} times" in report.reason
    counters = telemetry.report().counters
    # No candidate was judged: the block was known.
    assert (counters.get("candidates_judged", 0), counters["compositions_checked"]) == (0, 1)


@pytest.mark.usefixtures("composed_wins")
def test_a_later_process_finds_the_composed_whole(tmp_path: Path) -> None:
    plant_block(tmp_path)
    module = make_stack(6)
    with torch.no_grad():
        cudal1.accelerate(module, X, cache_dir=tmp_path, on_miss="tune")
        cudal1.restore(module)
        telemetry.reset()
        cudal1.accelerate(module, X, cache_dir=tmp_path, on_miss="error", strictness="error")
        module(X)
    assert cudal1.explain(module).regions[0].origin == "blocks"
    assert telemetry.report().counters.get("regions_tuned", 0) == 0


@pytest.mark.usefixtures("composed_wins")
def test_a_composed_whole_that_is_wrong_never_runs(tmp_path: Path) -> None:
    plant_block(tmp_path, add_one_to_output)
    module = make_stack(6)
    with torch.no_grad():
        expected = module(X)
        cudal1.accelerate(module, X, cache_dir=tmp_path, on_miss="tune")
        assert torch.equal(module(X), expected)
    explanation = cudal1.explain(module)
    assert "the whole that its blocks compose is wrong: output 0" in explanation.undone
    # Later processes know.
    assert list(tmp_path.rglob("*quarantine*"))
    with torch.no_grad():
        cudal1.restore(module)
        cudal1.accelerate(module, X, cache_dir=tmp_path, on_miss="tune")
        torch.testing.assert_close(module(X), expected)
    # The composition is not tried again.
    report = cudal1.explain(module).regions[0]
    assert (report.origin, report.speedup) == ("baseline", None)


def compile_in_eager(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
    """Stands in for Inductor."""
    return gm.forward


@pytest.mark.parametrize(("change", "checked"), [(same, 1), (add_one_to_output, 0)])
def test_the_backend_composes_and_checks_too(
    change: Change, checked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_in_eager)
    plant_block(tmp_path, change)
    module: nn.Module = make_stack(6)
    with torch.no_grad():
        expected = module(X)
        options = {"cache_dir": tmp_path, "on_miss": "tune"}
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="cudal1", options=options)
        torch.testing.assert_close(compiled(X), expected)
    assert telemetry.report().counters.get("compositions_checked", 0) == checked


def test_a_plan_has_a_row_for_each_block_and_the_groups_of_one_occurrence(tmp_path: Path) -> None:
    module, options = make_stack(6), Settings(cache_dir=tmp_path)
    with torch.no_grad():
        before = cudal1.plan(module, X, options)
        plant_block(tmp_path)
        after = cudal1.plan(module, X, options)
    whole, block, *groups = before.rows
    assert whole.reason.endswith("; decided by its blocks")
    assert block.reason.startswith("occurs 5 times; ")
    # Its time is part of the whole's.
    assert (whole.share_of_time, block.share_of_time, block.cached) == (1.0, None, False)
    assert {group.region.split("/")[1] for group in groups} == {"block0"}
    assert after.rows[1].cached
