"""What lies between blocks takes the kernels that won in them, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.entries import add_one_to_output
from tests.ir.stacks import ROWS, WIDTH, capture_region, make_stack
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.fusion.partition import FusionGroup, partition, splice
from torch_cudal1.ir.blocks import BlockPartition, partition_blocks
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Call, Program
from torch_cudal1.ir.records import Candidate, Region
from torch_cudal1.search.new_entry import store_checked_kernel
from torch_cudal1.search.rest_of_blocks import splice_known_kernels
from torch_cudal1.search.space import make_variant_region, rewrite_region
from torch_cudal1.store.context import TuneContext, make_context

CPU = torch.device("cpu")


@pytest.fixture
def place(tmp_path: Path) -> TuneContext:
    return make_context(CPU, Settings(cache_dir=tmp_path))


@pytest.fixture(scope="module")
def region() -> Region:
    return capture_region(make_stack(6), torch.randn(ROWS, WIDTH))


def list_rest(blocks: BlockPartition) -> list[Program]:
    """What lies before and behind the blocks."""
    digest = blocks.blocks[0].program.digest
    return [segment.program for segment in blocks.segments if segment.digest != digest]


def make_kernels(region: Region, blocks: BlockPartition) -> dict[FusionGroup, Program]:
    """For each fusion group of the block what shows that it ran: one more than it should be."""
    program = blocks.blocks[0].program
    roles = ("input",) * len(program.inputs)
    block = Region(program, roles, region.kind, "block", "block")
    form = make_variant_region(block, rewrite_region(block, assume_finite=False))
    return {
        group: add_one_to_output(group.region.program)
        for group in partition(form, products=True).groups
    }


def decide_block(region: Region, place: TuneContext, *, stores: bool) -> Program:
    """The block with those kernels; they are in the cache where a search `stores` them."""
    kernels = make_kernels(region, partition_blocks(region.program))
    for group, kernel in kernels.items():
        if stores:
            candidate = Candidate(kernel, "eager", "kernels", ("planted",))
            store_checked_kernel(place, group.region, candidate, [])
    program = partition_blocks(region.program).blocks[0].program
    block = Region(program, ("input",) * len(program.inputs), region.kind, "block", "block")
    form = make_variant_region(block, rewrite_region(block, assume_finite=False))
    return splice(form.program, kernels)


def test_the_ends_of_a_stack_run_the_kernels_of_its_blocks(
    region: Region, place: TuneContext
) -> None:
    block_program = decide_block(region, place, stores=True)
    changed = 0
    for segment in list_rest(partition_blocks(region.program)):
        program = splice_known_kernels(segment, [block_program], region, place)
        if program is None:
            continue
        changed += 1
        assert any(isinstance(step, Call) for step in program.steps)
        inputs = [torch.randn(item.shape) for item in segment.inputs]
        results, own = interpret(program, CPU)(inputs), interpret(segment, CPU)(inputs)
        assert [out is None or out.shape for out in results] == [
            out is None or out.shape for out in own
        ]
        assert not all(
            torch.equal(one, other)
            for one, other in zip(results, own, strict=True)
            if one is not None and other is not None
        )
    assert changed > 0


@pytest.mark.parametrize("stores", [True, False])
def test_kernels_that_no_block_runs_are_not_taken(
    stores: bool, region: Region, place: TuneContext
) -> None:
    decide_block(region, place, stores=stores)
    block_programs = [] if stores else [decide_block(region, place, stores=False)]
    for segment in list_rest(partition_blocks(region.program)):
        assert splice_known_kernels(segment, block_programs, region, place) is None
