"""What a reference Program tells of its inputs: bounds of integers, lengths of sums, operations."""

from __future__ import annotations

from tests.judge.programs import V, linear_relu, op, spec
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.judge.reference.analysis import analyse


def test_products_tell_their_length_and_operations() -> None:
    program = Program(
        (spec(8, 32), spec(32, 16)), (op("aten.mm.default", V(0), V(1), out=2),), (2,)
    )
    facts = analyse(program)
    assert facts.longest_reduction == 32
    assert facts.flops == 2 * 8 * 32 * 16


def test_an_index_is_bounded_by_what_it_points_into() -> None:
    index = TensorSpec("int64", (5,), (1,), "cpu")
    program = Program(
        (spec(7, 3), index), (op("aten.index_select.default", V(0), 0, V(1), out=2),), (2,)
    )
    assert analyse(program).bounds == {1: 7}


def test_what_goes_under_a_root_is_positive() -> None:
    steps = (op("aten.add.Scalar", V(0), 1e-5, out=1), op("aten.rsqrt.default", V(1), out=2))
    assert analyse(Program((spec(4),), steps, (2,))).positive == frozenset({0})
    assert not analyse(linear_relu().program).positive
