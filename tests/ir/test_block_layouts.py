"""The layout of what passes from block to block: as it is read, and no output's strides change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.ir.stacks import ROWS, WIDTH, capture_region, make_stack
from torch_cudal1.ir.block_layouts import insert_contiguous_copies, is_permuted
from torch_cudal1.ir.blocks import partition_blocks
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.runtime.runner import build_runner

CPU = torch.device("cpu")


class Channels(nn.Module):
    """Layers behind a permutation, as behind the convolutions of a speech encoder; `ends_plain`: a
    product ends it, whose result has no layout of its operands.
    """

    def __init__(self, *, ends_plain: bool) -> None:
        super().__init__()
        self.stack = make_stack(4)[1:-1]
        self.end = nn.Linear(WIDTH, WIDTH) if ends_plain else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (width, rows)."""
        result: torch.Tensor = self.end(self.stack(torch.tanh(x).t()))
        return result


def capture_channels(*, ends_plain: bool) -> Program:
    module = Channels(ends_plain=ends_plain).eval()
    return capture_region(module, torch.randn(WIDTH, ROWS)).program


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3), (3, 1), False),
        ((2, 3), (1, 2), True),
        ((1, 1500, 512), (768000, 1, 1500), True),
        ((1, 1500, 512), (1, 512, 1), False),
        ((2, 3), (0, 1), False),
        ((2, 3), (6, 2), False),
        ((4,), (1,), False),
        ((), (), False),
    ],
)
def test_only_a_dense_tensor_in_another_order_is_permuted(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: bool
) -> None:
    assert is_permuted(TensorSpec("float32", shape, strides, "cpu")) == expected


def test_what_enters_blocks_lies_as_it_is_read() -> None:
    program = capture_channels(ends_plain=True)
    partition = partition_blocks(program)
    (block,) = partition.blocks
    assert len(block.occurrences) == 3
    assert not any(is_permuted(spec) for spec in block.program.inputs)
    # One copy, where the layers begin: behind it everything has that layout.
    assert len(partition.program.steps) == len(program.steps) + 1
    inputs = [torch.randn(spec.shape) for spec in program.inputs]
    (expected,) = interpret(program, CPU)(inputs)
    for schedule in ("eager", "regional"):
        (result,) = build_runner(partition.program, schedule, CPU)(inputs)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        assert result is not None
        assert expected is not None
        assert result.stride() == expected.stride()


def test_an_output_keeps_the_strides_of_eager() -> None:
    program = capture_channels(ends_plain=False)
    (output,) = program.outputs
    assert output is not None
    assert is_permuted(value_specs(program)[output])
    partition = partition_blocks(program)
    assert partition.blocks
    assert len(partition.program.steps) == len(program.steps)


def test_later_steps_read_the_copy_and_outputs_name_the_original() -> None:
    class TwoOutputs(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            permuted = torch.tanh(x).t() * 2
            return permuted, permuted.exp()

    program = capture_region(TwoOutputs().eval(), torch.randn(3, 5)).program
    permuted, _ = program.outputs
    assert permuted is not None
    changed = insert_contiguous_copies(program, {permuted})
    assert changed is not None
    first, second = changed.outputs
    specs = value_specs(changed)
    assert first is not None
    assert second is not None
    assert is_permuted(specs[first])
    assert not is_permuted(specs[second])
    x = torch.randn(3, 5)
    for result, expected in zip(
        interpret(changed, CPU)([x]), interpret(program, CPU)([x]), strict=True
    ):
        assert result is not None
        assert expected is not None
        assert torch.equal(result, expected)


def test_a_step_that_reads_strides_keeps_them() -> None:
    class Strided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x).t().as_strided((3,), (1,)).exp()

    program = capture_region(Strided().eval(), torch.randn(3, 5)).program
    assert insert_contiguous_copies(program, {len(program.inputs)}) is None
