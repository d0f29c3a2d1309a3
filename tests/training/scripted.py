"""A race whose measurements are written down, for tests in which how quiet this machine is must not
matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch_cudal1.ir.records import Check
from torch_cudal1.judge.benchmark.candidate_timing import Timed
from torch_cudal1.judge.benchmark.quick import Ready


class Scripted(Ready):
    """What a clock hands over, with its measurements written down; `examined`: what is asked beside
    others afterwards.
    """

    def __init__(
        self, run: Callable[[], Timed], examined: Callable[[Timed], Timed] | None = None
    ) -> None:
        self._run, self._examined = run, examined

    @property
    def beside(self) -> bool:
        return self._examined is not None

    def measured(self) -> Timed:
        return self._run()

    def examined(self, timed: Timed) -> Timed:
        assert self._examined is not None
        return self._examined(timed)

    def heard_again(self, timed: Timed) -> Timed:
        return replace(timed, checks=(*timed.checks[:-1], Check("wall_slope", True)))
