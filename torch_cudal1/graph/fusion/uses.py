"""Which step makes each value of a Program, and which steps read it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch_cudal1.ir.program import Program, Step

__all__ = ["Uses", "collect_uses"]


@dataclass(frozen=True)
class Uses:
    """`maker`: the step that makes a value. `readers`: the steps that read it; -1 stands for the
    outputs of the whole Program.
    """

    steps: Sequence[Step]
    maker: Mapping[int, int]
    readers: Mapping[int, frozenset[int]]

    def is_used_only_in(self, position: int, inside: Collection[int]) -> bool:
        """Whether nothing outside reads what the step at `position` yields."""
        return all(
            # -1 is never inside, so a result of the whole is always read outside.
            self.readers.get(out, frozenset()) <= set(inside)
            for out in self.steps[position].writes
        )


def collect_uses(program: Program) -> Uses:
    """The uses of all values of `program`."""
    maker: dict[int, int] = {}
    # A returned value must be written, as if a step read it.
    readers: dict[int, set[int]] = {out: {-1} for out in program.outputs if out is not None}
    for position, step in enumerate(program.steps):
        maker.update(dict.fromkeys(step.writes, position))
        for index in step.reads:
            readers.setdefault(index, set()).add(position)
    return Uses(
        program.steps, maker, {index: frozenset(positions) for index, positions in readers.items()}
    )
