"""Whose memory a value of a Program is: made by which step, or an operand's of it."""

from __future__ import annotations

from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.check import used_values
from torch_cudal1.ir.program import Alloc, Aten, Call, Program, Step, step_outs

__all__ = ["Makers", "is_view", "makes_memory", "passes_on"]

_MAY_PASS_ON = frozenset(  # though their schemas do not say so
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


class Makers:
    """Which step of a Program yields a value, and which one made its memory."""

    def __init__(self, program: Program) -> None:
        self._steps = program.steps
        self._maker = {
            out: position for position, step in enumerate(program.steps) for out in step_outs(step)
        }

    def maker(self, value: int) -> int | None:
        """The position of the step that yields `value`; None for an input or a constant."""
        return self._maker.get(value)

    def root(self, value: int) -> int | None:
        """The position of the step that made the memory of `value`, views followed back; None for
        an input's or a constant's.
        """
        position = self._maker.get(value)
        while position is not None and passes_on(self._steps[position]):
            viewed = next(iter(used_values(self._steps[position])), None)
            position = None if viewed is None else self._maker.get(viewed)
        return position


def is_view(step: Step) -> bool:
    """Whether it moves nothing: an ATen operator whose result is its operand's memory."""
    return isinstance(step, Aten) and any(
        result.alias_info is not None for result in overload(step.target)._schema.returns
    )


def passes_on(step: Step) -> bool:
    """Whether what an operator yields may be its operand's memory."""
    return is_view(step) or (isinstance(step, Aten) and step.target in _MAY_PASS_ON)


def makes_memory(step: Step) -> bool:
    """Whether nothing that a step yields can be memory of an operand: an operator that is no view,
    a nested Program of such.
    """
    if isinstance(step, Call):
        inner, makers = step.program, Makers(step.program)
        made = [None if out is None else makers.root(out) for out in inner.outputs]
        return all(
            position is not None and makes_memory(inner.steps[position]) for position in made
        )
    return isinstance(step, Alloc) or (isinstance(step, Aten) and not passes_on(step))
