"""Repeated blocks: found by structure, cut where no fusion is lost, and equal in every model that has
them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.ir.stacks import (
    ROWS,
    WIDTH,
    capture_region,
    capture_stack,
    capture_transformer,
    make_stack,
)
from torch_cudal1.ir.blocks import BlockPartition, extract_steps, partition_blocks
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.value_specs import value_specs

CPU = torch.device("cpu")
X = torch.randn(ROWS, WIDTH)


def run_segments(partition: BlockPartition, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of the whole Program, segment by segment."""
    program = partition.program
    constants = [program.payloads[name] for name in program.constants]
    values = dict(enumerate([*inputs, *constants]))
    for segment in partition.segments:
        results = interpret(segment.program, CPU)([values[index] for index in segment.inputs])
        values.update(zip(segment.outputs, results, strict=True))
    return [values[index] for index in program.outputs if index is not None]


def test_layers_are_occurrences_of_one_block() -> None:
    partition = partition_blocks(capture_stack(6))
    (block,) = partition.blocks
    # One layer is cut in two: its parts are the ends.
    assert len(block.occurrences) == 5
    assert {occurrence.digest for occurrence in block.occurrences} == {block.program.digest}
    assert partition.distinct_share < 0.5


def test_segments_are_all_steps_in_their_order() -> None:
    partition = partition_blocks(capture_stack(5))
    positions = [position for segment in partition.segments for position in segment.steps]
    assert positions == list(range(len(partition.program.steps)))


@pytest.mark.parametrize("kind", ["bert", "llama", "vit"])
def test_segment_by_segment_the_result_is_the_same(kind: str) -> None:
    program = capture_transformer(kind, 4)
    partition = partition_blocks(program)
    assert partition.blocks
    inputs = [make_input(program, number) for number in range(len(program.inputs))]
    expected = [value for value in interpret(program, CPU)(inputs) if value is not None]
    for result, value in zip(run_segments(partition, inputs), expected, strict=True):
        assert torch.equal(result, value)


def make_input(program: Program, number: int) -> Tensor:
    """Zeros for indices, which are in range of every table; else random numbers."""
    spec = program.inputs[number]
    made = torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype)
    return made.normal_() if made.is_floating_point() else made.zero_()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("bert", 4), ("bert", 6)),
        (("llama", 4), ("llama with a head", 5)),
        (("vit", 3), ("vit", 5)),
    ],
    ids=["depth", "depth and head", "depth of images"],
)
def test_a_block_of_one_model_is_that_of_another(
    one: tuple[str, int], other: tuple[str, int]
) -> None:
    (block,), (same,) = (
        partition_blocks(capture_transformer(*model)).blocks for model in (one, other)
    )
    assert block.program.digest == same.program.digest


def test_layers_of_another_width_are_another_block() -> None:
    first, second = capture_stack(4, hidden=12), capture_stack(4, hidden=16)
    (block,), (other,) = (partition_blocks(program).blocks for program in (first, second))
    assert block.program.digest != other.program.digest


def test_every_stage_of_a_model_has_its_block() -> None:
    stages = nn.Sequential(make_stack(4, 12)[:-1], nn.Linear(WIDTH, WIDTH), make_stack(4, 16)[1:])
    blocks = partition_blocks(capture_region(stages.eval(), X).program).blocks
    assert [len(block.occurrences) for block in blocks] == [3, 3]


@pytest.mark.parametrize("kind", ["bert", "llama", "vit"])
def test_a_cut_parts_no_steps_that_inductor_fuses(kind: str) -> None:
    partition = partition_blocks(capture_transformer(kind, 4))
    assert partition.lost_fusions == 0
    block = partition.blocks[0]
    # A layer that begins with its norm would part the sum before from it.
    begin, length = block.occurrences[0].steps[0], len(block.program.steps)
    norms = [
        step.target.split(".")[1] for step in partition.program.steps[begin : begin + length // 2]
    ]
    assert norms[0] not in ("native_layer_norm", "pow", "add")


class Fused(nn.Module):
    """Layers whose ends Inductor fuses wherever they are cut: each value is read by all that
    follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        side = x
        for one, two in zip(self.layers[::2], self.layers[1::2], strict=True):
            # The side chain needs no product of a layer, so it is one kernel in the whole.
            side = torch.sin(torch.cos(side))
            x = two(torch.relu(one(x))) + side
        return x


def test_a_cut_leaves_a_product_with_what_is_done_to_its_result() -> None:
    class Branch(nn.Module):
        """A layer whose products could be parted from what follows at no cost to Inductor."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    region = capture_region(nn.Sequential(nn.ReLU(), *(Branch() for _ in range(6))).eval(), X)
    (block,) = partition_blocks(region.program).blocks
    names = ("aten.mm.default", "aten.relu.default", "aten.add.Tensor")
    order = [step.target for step in block.program.steps if step.target in names]
    pairs = {tuple(order[number : number + 2]) for number in (0, 2)}
    assert pairs == {("aten.mm.default", name) for name in names[1:]}


def test_fusions_that_every_cut_parts_are_counted() -> None:
    partition = partition_blocks(capture_region(Fused().eval(), X).program)
    assert partition.blocks
    assert partition.lost_fusions > 0


class Masked(nn.Module):
    """Layers that derive the same from one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_stack(4)[1:-1]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.where(mask > 0, x, torch.exp(mask * 2)))
        return x


def test_what_layers_derive_from_one_tensor_is_derived_once() -> None:
    region = capture_region(Masked().eval(), X, torch.randn(ROWS, WIDTH))
    partition = partition_blocks(region.program)
    counts = [
        sum(step.target == "aten.exp.default" for step in segment.program.steps)
        for segment in partition.segments
    ]
    assert sum(counts) == 1
    assert partition.blocks


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(WIDTH, WIDTH),
        # A block has two products at least, and occurs twice.
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))),
        # The order in which numbers are drawn is part of the result.
        nn.Sequential(*make_stack(4), nn.Dropout()).train(),
    ],
    ids=["one layer", "few layers of one product", "random numbers"],
)
def test_a_program_without_blocks_has_no_segments(module: nn.Module) -> None:
    partition = partition_blocks(capture_region(module, X).program)
    assert (partition.blocks, partition.segments, partition.distinct_share) == ((), (), 1.0)


def test_extracted_steps_take_what_they_read_and_give_what_is_read_outside() -> None:
    program = capture_stack(1)
    norm = next(
        position
        for position, step in enumerate(program.steps)
        if step.target == "aten.native_layer_norm.default"
    )
    segment = extract_steps(program, [norm], value_specs(program))
    assert segment.inputs == program.steps[norm].reads
    # The mean and the deviation are read by no other step.
    assert segment.outputs == program.steps[norm].writes[:1]


class Biased(nn.Module):
    """Layers that all read one value, made by a kernel from `rows` x 1 and 1 x WIDTH numbers."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.column, self.row = nn.Parameter(torch.randn(rows, 1)), nn.Parameter(torch.randn(WIDTH))
        self.layers = make_stack(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.tanh(self.column) * self.row
        for layer in self.layers:
            x = layer(x) if isinstance(layer, nn.Linear) else layer(x) + bias
        return x


def test_a_large_value_that_all_blocks_read_is_a_lost_fusion() -> None:
    for rows, lost in ((1, 0), (ROWS, 1)):
        program = capture_region(Biased(rows).eval(), torch.randn(ROWS, WIDTH)).program
        (block,) = partition_blocks(program).blocks
        assert block.lost_fusions == lost
