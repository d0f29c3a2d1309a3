"""How a Program is run: step by step or through Inductor, whole or block by block, with or without a
CUDA graph around it.

    Schedule("inductor", cuda_graph=True) == Schedule.parse("inductor+graph") == "inductor+graph"

A schedule is the text that entries, evidence and tables hold. It is compared, hashed and written
to JSON as that text. It runs nothing: `runtime.runner` makes a Program callable under one.
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "BASES",
    "EAGER",
    "INDUCTOR",
    "INDUCTOR_GRAPH",
    "MAX_AUTOTUNE",
    "REGIONAL",
    "SCHEDULES",
    "Schedule",
]

BASES = ("eager", "regional", "inductor", "max-autotune")
_GRAPH = "+graph"


class Schedule(str):
    """`base` ("eager": operator by operator; "inductor"; "regional": Inductor block by block;
    "max-autotune": Inductor with its autotuning) and whether a CUDA graph replays it. Raises ValueError for any other base.
    """

    # A str without attributes of its own: base and graph are read from the text, so they cannot
    # differ from it.
    __slots__ = ()

    def __new__(cls, base: str, cuda_graph: bool = False) -> Self:
        if base not in BASES:
            raise ValueError(f"schedule base {base!r}; expected one of {BASES}")
        return super().__new__(cls, f"{base}{_GRAPH if cuda_graph else ''}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The schedule that a stored text names. Raises ValueError if it names none."""
        # A Schedule is a str itself; records parse at every construction.
        if isinstance(text, cls):
            return text
        try:
            return cls(text.removesuffix(_GRAPH), text.endswith(_GRAPH))
        except ValueError:
            raise ValueError(
                f"schedule {text!r}; expected one of {tuple(map(str, SCHEDULES))}"
            ) from None

    @property
    def base(self) -> str:
        """What runs the steps, whether a graph replays them or not."""
        return str(self).removesuffix(_GRAPH)

    @property
    def cuda_graph(self) -> bool:
        """Whether a CUDA graph replays it."""
        return self.endswith(_GRAPH)

    @property
    def compiles(self) -> bool:
        """Whether Inductor compiles the Program."""
        return self.base != "eager"

    def __reduce__(self) -> tuple[type[Schedule], tuple[str, bool]]:
        # `str` would hand its text to `__new__` as the base when it is copied or unpickled.
        return Schedule, (self.base, self.cuda_graph)


EAGER = Schedule("eager")
INDUCTOR = Schedule("inductor")
REGIONAL = Schedule("regional")
MAX_AUTOTUNE = Schedule("max-autotune")
INDUCTOR_GRAPH = Schedule("inductor", cuda_graph=True)
# In the order of preference among baselines that are equally fast: the simplest first.
SCHEDULES = tuple(Schedule(base, cuda_graph) for cuda_graph in (False, True) for base in BASES)
