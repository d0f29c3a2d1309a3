"""A deep model is decided by its blocks: each is searched for once, and what was decided for it runs
in every occurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.entries import add_one_to_output, entry_for, same
from tests.ir.stacks import ROWS, WIDTH, Layer, capture_region, make_stack
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.blocks import partition_blocks
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Call, Program, renumber_steps
from torch_cudal1.ir.records import Candidate, Entry, Region
from torch_cudal1.search import by_blocks
from torch_cudal1.search.by_blocks import find_blocks_to_tune, tune_by_blocks
from torch_cudal1.search.operator_timing import OperatorChoice
from torch_cudal1.search.tune import Choice
from torch_cudal1.store.context import TuneContext, make_context

CPU = torch.device("cpu")
X = torch.randn(ROWS, WIDTH)
Change = Callable[[Program], Program]
UNREAD = -1  # the number of a value that no step reads


@pytest.fixture
def place(tmp_path: Path) -> TuneContext:
    return make_context(CPU, Settings(cache_dir=tmp_path, budget_s=60.0))


class BlockChooser:
    """Stands in for the search of a block; remembers what it was asked."""

    def __init__(self, change: Change = same, schedule: str = "inductor", **evidence: Any) -> None:
        self.change, self.schedule, self.evidence = change, schedule, evidence
        self.regions: list[Region] = []
        self.budgets_s: list[float] = []

    def __call__(self, region: Region, place: TuneContext) -> Choice:
        assert place.settings.on_miss == "tune"
        self.regions.append(region)
        self.budgets_s.append(place.settings.budget_s)
        origin = "baseline" if self.change is same else "rewrites"
        names = () if self.change is same else ("planted",)
        program = self.change(region.program)
        candidate = Candidate(program, self.schedule, origin, names)
        entry = entry_for(region, candidate, place.settings)
        entry = replace(entry, evidence={**entry.evidence, **self.evidence})
        return Choice(region, candidate, entry, "planted")


def make_inputs(program: Program) -> list[torch.Tensor]:
    return [torch.randn(item.shape).as_strided(item.shape, item.strides) for item in program.inputs]


def compose(region: Region, place: TuneContext, chooser: BlockChooser) -> Entry:
    return tune_by_blocks(region, place, partition_blocks(region.program), chooser)


def test_a_block_is_searched_for_once_with_the_whole_budget(place: TuneContext) -> None:
    chooser = BlockChooser()
    compose(capture_region(make_stack(6), X), place, chooser)
    (block,) = chooser.regions
    assert (block.granularity, block.kind) == ("block", "inference")
    assert set(block.roles) == {"parameter", "input"}
    assert chooser.budgets_s == [pytest.approx(60.0, abs=1.0)]


def test_several_blocks_share_the_budget_the_largest_first(place: TuneContext) -> None:
    stages = nn.Sequential(make_stack(3, 16), nn.Linear(3, WIDTH), *(Layer(12) for _ in range(5)))
    chooser = BlockChooser()
    entry = compose(capture_region(stages.eval(), X), place, chooser)
    assert [block["occurrences"] for block in entry.evidence["blocks"]] == [4, 2]
    assert chooser.budgets_s == [pytest.approx(30.0, abs=1.0), pytest.approx(60.0, abs=1.0)]


def test_every_occurrence_runs_what_was_decided(place: TuneContext) -> None:
    region = capture_region(make_stack(6), X)
    entry = compose(region, place, BlockChooser(add_one_to_output))
    assert (entry.choice.origin, entry.choice.schedule) == ("blocks", "regional")
    assert entry.choice.techniques == ("planted",)
    ones = sum(step.target == "aten.add.Scalar" for step in entry.choice.program.steps)
    assert ones == entry.evidence["blocks"][0]["occurrences"] == 5
    # It is a Program as any other, with the whole's inputs and outputs.
    inputs = make_inputs(region.program)
    (result,) = interpret(entry.choice.program, CPU)(inputs)
    (own,) = interpret(region.program, CPU)(inputs)
    assert result.shape == own.shape
    assert not torch.equal(result, own)


def carry_constant(program: Program) -> Program:
    """`add_one_to_output` with a constant that nothing reads."""
    changed, count = add_one_to_output(program), len(program.inputs)
    # A constant is numbered behind the inputs.
    steps, numbers = renumber_steps(
        changed.steps, {**{index: index for index in range(count)}, UNREAD: count}
    )
    outputs = tuple(None if index is None else numbers[index] for index in changed.outputs)
    payloads = {"one": torch.ones(1)}
    return replace(changed, steps=steps, outputs=outputs, constants=("one",), payloads=payloads)


def test_what_holds_constants_is_one_nested_call(place: TuneContext) -> None:
    region = capture_region(make_stack(6), X)
    nested, flat = (
        compose(region, place, BlockChooser(change)).choice.program
        for change in (carry_constant, add_one_to_output)
    )
    assert sum(isinstance(step, Call) for step in nested.steps) == 5
    inputs = make_inputs(region.program)
    assert torch.equal(interpret(nested, CPU)(inputs)[0], interpret(flat, CPU)(inputs)[0])


def test_without_a_winner_the_whole_is_inductors_block_by_block(place: TuneContext) -> None:
    region = capture_region(make_stack(6), X)
    entry = compose(region, place, BlockChooser())
    assert entry.choice == Candidate(region.program, "regional", "baseline")
    assert entry.speedup == 1.0


def add_two_to_output(program: Program) -> Program:
    return add_one_to_output(add_one_to_output(program))


@pytest.mark.parametrize(("change", "origin"), [(same, "baseline"), (add_one_to_output, "blocks")])
def test_faster_operators_stay_with_blocks_and_without(
    change: Change, origin: str, place: TuneContext
) -> None:
    region = capture_region(make_stack(6), X)
    # Stands in for other operators: the whole's result tells that it ran.
    operators = OperatorChoice(add_two_to_output(region.program), ("convolution as product",))
    partition = partition_blocks(operators.program)
    entry = tune_by_blocks(region, place, partition, BlockChooser(change), operators=operators)
    assert entry.choice.origin == origin
    assert "convolution as product" in entry.choice.techniques
    inputs = make_inputs(region.program)
    plain = compose(region, place, BlockChooser(change))
    ours, own = (interpret(each.choice.program, CPU)(inputs)[0] for each in (entry, plain))
    torch.testing.assert_close(ours, own + 2)


@pytest.mark.parametrize(
    ("block", "whole"),
    [
        ("eager", "eager"),
        ("inductor", "regional"),
        ("inductor+graph", "regional+graph"),
        ("eager+graph", "eager+graph"),
        ("max-autotune", "regional"),
    ],
)
def test_the_whole_runs_as_its_blocks_do(block: str, whole: str, place: TuneContext) -> None:
    entry = compose(capture_region(make_stack(6), X), place, BlockChooser(schedule=block))
    assert entry.choice.schedule == whole


@pytest.mark.parametrize(
    ("schedule", "timed", "whole"),
    [
        ("eager+graph", ("eager", "inductor+graph"), "regional+graph"),
        # Inductor does not work here: it is no baseline.
        ("eager+graph", ("eager", "eager+graph"), "eager+graph"),
        ("eager", ("eager", "inductor"), "regional"),
    ],
)
def test_what_lies_between_blocks_of_kernels_is_compiled(
    schedule: str, timed: tuple[str, ...], whole: str, place: TuneContext
) -> None:
    baselines_us = dict.fromkeys(timed, 100.0)
    chooser = BlockChooser(add_one_to_output, schedule, baselines_us=baselines_us)
    entry = compose(capture_region(make_stack(6), X), place, chooser)
    assert entry.choice.schedule == whole


def test_times_are_sums_over_all_occurrences(place: TuneContext) -> None:
    entry = compose(
        capture_region(make_stack(6), X),
        place,
        BlockChooser(add_one_to_output, baselines_us={"eager": 120.0, "inductor": 100.0}),
    )
    assert entry.evidence["baselines_us"] == {"eager": 600.0, "regional": 500.0}
    timing = entry.evidence["timing"]
    assert (timing["baseline"], timing["baseline_us"], timing["candidate_us"]) == (
        "regional",
        500.0,
        50.0,
    )
    assert (timing["speedup"], timing["low"], timing["high"]) == pytest.approx((10.0, 9.0, 11.0))
    assert entry.speedup == pytest.approx(9.0)
    assert place.cache.put(entry) is not None


def test_of_blocks_that_were_not_benchmarked_no_speed_is_claimed(place: TuneContext) -> None:
    chooser = BlockChooser(add_one_to_output, baselines_us={}, timing=None, granularity="island")
    entry = compose(capture_region(make_stack(6), X), place, chooser)
    assert "timing" not in {key for key, value in entry.evidence.items() if value}
    assert entry.speedup == 1.0


def put_on_cuda(region: Region) -> Region:
    """The same region, as if its tensors were on a GPU."""
    inputs = tuple(replace(spec, device="cuda") for spec in region.program.inputs)
    return replace(region, program=replace(region.program, inputs=inputs))


def test_deep_inference_regions_are_decided_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    region = capture_region(make_stack(6), X)
    assert find_blocks_to_tune(region) is None  # a search of the whole is short
    monkeypatch.setattr(by_blocks, "MIN_COPIED_STEPS", 10)
    assert find_blocks_to_tune(region) is not None
    monkeypatch.setattr(by_blocks, "MIN_COPIED_STEPS", 10_000)
    monkeypatch.setattr(by_blocks, "_MIN_STACK_STEPS", 10)
    # A stack of layers is deep with fewer steps, where kernels may be found for them.
    assert find_blocks_to_tune(region) is None
    assert find_blocks_to_tune(put_on_cuda(region)) is not None
    assert find_blocks_to_tune(put_on_cuda(capture_region(make_stack(5), X))) is None
    monkeypatch.setattr(by_blocks, "MIN_COPIED_STEPS", 10)
    # A block is searched for as it is, and a training step is measured as a whole.
    assert find_blocks_to_tune(replace(region, granularity="block")) is None
    step = capture_regions(make_stack(6).train(), (X,))
    assert [find_blocks_to_tune(part) for part in step] == [None, None]
