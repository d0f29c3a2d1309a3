"""Which step of a Program made the memory of a value, and which steps may return an operand's
memory.
"""

from __future__ import annotations

from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.program import Alloc, Aten, Call, Program, Step

__all__ = ["ValueOrigins", "is_view", "makes_fresh_memory", "may_return_operand"]

# Operators that may return memory of an operand although their schemas do not say so: a reshape is
# a view where the strides permit it, dropout without training returns its input, and pieces of an
# unsafe split share one tensor.
_MAY_RETURN_OPERAND = frozenset(
    f"aten.{name}"
    for name in (
        *(
            "_unsafe_view.default",
            "reshape.default",
            "_reshape_alias.default",
            "contiguous.default",
            "lift_fresh.default",
        ),
        *(
            "unsafe_split.Tensor",
            "unsafe_split_with_sizes.default",
            "unsafe_chunk.default",
            "native_dropout.default",
        ),
    )
)


class ValueOrigins:
    """Which step of a Program yields a value, and which one made its memory."""

    def __init__(self, program: Program) -> None:
        self._steps = program.steps
        self._maker = {
            out: position for position, step in enumerate(program.steps) for out in step.writes
        }

    def maker(self, value: int) -> int | None:
        """The position of the step that yields `value`; None for an input or a constant."""
        return self._maker.get(value)

    def root(self, value: int) -> int | None:
        """The position of the step that made the memory of `value`, with views followed back. None
        for memory of an input or a constant.
        """
        position = self._maker.get(value)
        while position is not None and may_return_operand(self._steps[position]):
            # View operators of ATen take the viewed tensor as their first operand.
            viewed = next(iter(self._steps[position].reads), None)
            position = None if viewed is None else self._maker.get(viewed)
        return position


def is_view(step: Step) -> bool:
    """Whether a step is an ATen operator whose result is its operand's memory, so that it moves no
    data.
    """
    return isinstance(step, Aten) and any(
        # The schema marks a view: `Tensor(a)` among its results.
        result.alias_info is not None
        for result in overload(step.target)._schema.returns
    )


def may_return_operand(step: Step) -> bool:
    """Whether what an operator yields may be its operand's memory."""
    return is_view(step) or (isinstance(step, Aten) and step.target in _MAY_RETURN_OPERAND)


def makes_fresh_memory(step: Step) -> bool:
    """Whether no result of a step can be memory of an operand: an operator that is no view, or a
    nested Program whose outputs are made by such operators.
    """
    if isinstance(step, Call):
        # A nested Program may hand its own operand on, so its outputs are followed back too.
        callee, makers = step.program, ValueOrigins(step.program)
        root_positions = [None if out is None else makers.root(out) for out in callee.outputs]
        return all(
            position is not None and makes_fresh_memory(callee.steps[position])
            for position in root_positions
        )
    return isinstance(step, Alloc) or (isinstance(step, Aten) and not may_return_operand(step))
