"""How thoroughly a candidate is tested: named sets of numbers, as frozen values.

A `Profile` holds the knobs of the checks in `judge.checks`; which check reads which of them is in
`judge.checks.registry`. How a candidate is timed is `judge.benchmark.timing_plan`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch_cudal1.judge.benchmark.timing_plan import TimingProfile

__all__ = [
    "ALL_DISTRIBUTIONS",
    "LAYOUTS",
    "PROFILES",
    "UPDATE_WAYS",
    "Profile",
    "ProfileName",
    "profile_for",
]

ProfileName: TypeAlias = Literal["fast", "standard", "strict"]
FIRST_SIX = ("normal", "shifted", "uniform", "large", "small", "log_uniform")
ALL_DISTRIBUTIONS = (
    *FIRST_SIX,
    "thousand",
    "impulse",
    "constant_rows",
    "sorted",
    "sparse",
    "integers",
)
UPDATE_WAYS = (
    "data_copy",
    "data",
    "copy",
    "load",
    "assign",
    "sgd",
    "foreach",
    "fused",
    "swap",
    "inference",
    "functional",
    "deepcopy",
    "channels_last",
)  # the hardest first
LAYOUTS = ("transposed", "channels_last", "step 2", "offset 1", "expanded", "same tensor twice")


@dataclass(frozen=True)
class Profile:
    """How much of a candidate is tested. How accurate it must be is the contract's business. A
    number of 0 means: not asked.

    - distributions x seeds: secret input sets of `numerics`; an empty tuple is the short plan
      (normal, shifted, a secret one).
    - all_impostors: the comparator is tried with every known wrong result, those with a wrong
      parameter too.
    - perturbed: at most so many parameters and buffers, drawn in secret, are changed one at a time.
    - update_ways, shapes, layouts, dtypes, specials: how many of each, drawn in secret where the
      profile leaves some out.
    - history: single elements changed; held: outputs in the caller's hands; soak: calls of a
      source in a row, of which every result is compared; of a Program a thirtieth.
    - repeats: bit-equal runs, in `processes` processes. replays: of a captured CUDA graph.
      reentrant: concurrent calls.
    - gradient_rounds: backward passes. descent: steps of a loss curve.
    - compiled: whether `mode` runs the candidate inside torch.compile too.
    - resource_calls, sanitizers: for the detectors of memory and resources.
    - budget_s: where one input set is so slow that the numbers would take longer, fewer are asked;
      each check says how many.
    """

    name: ProfileName
    distributions: tuple[str, ...]
    seeds: int
    all_impostors: bool
    perturbed: int
    update_ways: int
    shapes: int
    layouts: int
    dtypes: int
    all_specials: bool
    history: int
    held: int
    soak: int
    replays: int
    reentrant: int
    repeats: int
    processes: int
    gradient_rounds: int
    descent: int
    compiled: bool
    resource_calls: int
    sanitizers: tuple[str, ...]
    budget_s: float

    def __post_init__(self) -> None:
        if self.held < 2 or self.repeats < 3 or self.seeds < 1:
            raise ValueError(
                f"profile {self.name!r} needs at least 2 held outputs, 3 repeats and 1 seed; came {self}"
            )
        if unknown := set(self.distributions) - set(ALL_DISTRIBUTIONS):
            raise ValueError(
                f"distributions {sorted(unknown)}; expected some of {ALL_DISTRIBUTIONS}"
            )


PROFILES: dict[ProfileName, Profile] = {
    "fast": Profile(
        name="fast",
        distributions=(),
        seeds=1,
        all_impostors=False,
        perturbed=6,
        update_ways=2,
        shapes=6,
        layouts=4,
        dtypes=0,
        all_specials=False,
        history=2,
        held=2,
        soak=300,
        replays=0,
        reentrant=0,
        repeats=3,
        processes=1,
        gradient_rounds=1,
        descent=0,
        compiled=False,
        resource_calls=10,
        sanitizers=(),
        budget_s=5.0,
    ),
    "standard": Profile(
        name="standard",
        distributions=FIRST_SIX,
        seeds=8,
        all_impostors=True,
        perturbed=64,
        update_ways=len(UPDATE_WAYS),
        shapes=12,
        layouts=len(LAYOUTS),
        dtypes=3,
        all_specials=True,
        history=8,
        held=4,
        soak=3_000,
        replays=3,
        reentrant=200,
        repeats=10,
        processes=2,
        gradient_rounds=2,
        descent=0,
        compiled=False,
        resource_calls=50,
        sanitizers=("memcheck",),
        budget_s=120.0,
    ),
    "strict": Profile(
        name="strict",
        distributions=ALL_DISTRIBUTIONS,
        seeds=32,
        all_impostors=True,
        perturbed=1_000_000,
        update_ways=len(UPDATE_WAYS),
        shapes=24,
        layouts=len(LAYOUTS),
        dtypes=3,
        all_specials=True,
        history=32,
        held=4,
        soak=20_000,
        replays=3,
        reentrant=2_000,
        repeats=100,
        processes=3,
        gradient_rounds=2,
        descent=200,
        compiled=True,
        resource_calls=1_000,
        sanitizers=("memcheck", "initcheck", "racecheck", "synccheck"),
        budget_s=1_800.0,
    ),
}


def profile_for(timing: TimingProfile) -> Profile:
    """The profile that goes with a timing profile: training and comparisons with published numbers
    validate as fast.
    """
    return PROFILES[
        "standard" if timing == "standard" else "strict" if timing == "strict" else "fast"
    ]
