"""How thoroughly a candidate is looked at: named sets of numbers, as frozen values.

A `Profile` says how much of a candidate is tested. A `TimingPlan` says how many paired samples of
what length are taken, when they count as steady and how a score is made of them. Here nothing is
measured (`judge.benchmark.protocol` does) or decided (`judge.evaluate.decide` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "ALL_DISTRIBUTIONS",
    "BUCKETS",
    "LAYOUTS",
    "PROFILES",
    "SURPRISE",
    "TIMING_PLANS",
    "UPDATE_WAYS",
    "Profile",
    "ProfileName",
    "TimingPlan",
    "TimingProfile",
    "profile_for",
]

TimingProfile: TypeAlias = Literal["fast", "standard", "strict", "train", "cudal1"]
BUCKETS = 7  # CUDA-L1 paper, section 2.4.2: seven consecutive blocks of runs
SURPRISE = 3.0  # CUDA-L1 paper: a speed-up above this is measured again in another process
_MOST_ROUNDS = 1_000_000  # the paper's own range ends there


@dataclass(frozen=True)
class TimingPlan:
    """Numbers of one timing profile. A bucket is a seventh of the measurement; a side is the
    baseline or the candidate.

    - pairs: paired samples per bucket. side_us: least timed microseconds per side and bucket (a
      sample is at least one call).
    - gate: what becomes of buckets that disagree after up to `rounds` times the pairs. "reject":
      the candidate is refused as unstable; "widen": its interval becomes the range of the buckets;
      "paper": refused if the variance of the seven bucket means exceeds 0.005.
    - margin: the speed-up that decides. A measurement ends when it is plain on which side of it a
      candidate is: after half of the pairs if all buckets lie there, after 3 to 6 pairs of slow
      calls if these are far from it, and with buckets that disagree if their whole range lies
      there. None: all pairs are taken.
    - order: "abba" (blocks of two pairs, the second in reverse) or "random" (each pair for itself,
      as in the paper).
    - hot_only: the L2 cache is left as it is; otherwise cold and hot are both measured and the
      lower speed-up decides.
    - processes: how many fresh processes measure; the lowest score counts. outputs: how many timed
      calls have their results judged.
    - budget_s: wall time of one measurement, beyond which fewer pairs are taken (at least one per
      bucket).
    - window_s: when set, the pairs fill this time, whatever `pairs` says. The paper: 1800 s in
      training, 1200 s for its tables.
    """

    profile: TimingProfile
    pairs: int
    side_us: float
    gate: Literal["reject", "widen", "paper"]
    rounds: int = 3
    margin: float | None = None
    order: Literal["abba", "random"] = "abba"
    hot_only: bool = False
    processes: int = 1
    outputs: int = BUCKETS
    budget_s: float = 10.0
    window_s: float | None = None

    def __post_init__(self) -> None:
        least = min(self.pairs, self.rounds, self.processes)
        if least < 1 or min(self.side_us, self.budget_s) <= 0 or self.outputs < 0:
            raise ValueError(
                f"a timing plan needs at least one pair, round and process, and positive times; came {self}"
            )
        if self.window_s is not None and self.window_s <= 0:
            raise ValueError(f"a window of {self.window_s} s; expected a positive time or None")

    @property
    def sample_us(self) -> float:
        """Timed microseconds of one sample."""
        return self.side_us / self.pairs

    @property
    def most_pairs(self) -> int:
        """Pairs per bucket that a window may hold."""
        return _MOST_ROUNDS // BUCKETS


# `train`: runs of 0.25 ms keep a candidate below 0.1 s of GPU time. `cudal1`: 10 runs a block as in
# the released evaluator, unless the window says more; a caller shortens the window with
# `dataclasses.replace` and labels what it quotes.
TIMING_PLANS: dict[TimingProfile, TimingPlan] = {
    "fast": TimingPlan("fast", pairs=8, side_us=20e3, gate="widen", budget_s=10.0),
    "standard": TimingPlan("standard", pairs=25, side_us=100e3, gate="reject", budget_s=60.0),
    "strict": TimingPlan(
        "strict", pairs=100, side_us=1e6, gate="reject", processes=2, outputs=8, budget_s=300.0
    ),
    "train": TimingPlan("train", pairs=6, side_us=1_500.0, gate="reject", budget_s=5.0),
    "cudal1": TimingPlan(
        "cudal1",
        pairs=10,
        side_us=10.0,
        gate="paper",
        rounds=1,
        order="random",
        hot_only=True,
        budget_s=1_300.0,
        window_s=1_200.0,
    ),
}

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
    - history: single elements changed; held: outputs in the caller's hands; soak: calls between a
      first and a last one.
    - repeats: bit-equal runs, in `processes` processes. replays: of a captured CUDA graph.
      reentrant: concurrent calls.
    - gradient_rounds: backward passes. descent: steps of a loss curve.
    - modes: train, autocast, copies and the like, `compiled`: inside torch.compile too.
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
    modes: bool
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
        shapes=2,
        layouts=2,
        dtypes=0,
        all_specials=False,
        history=2,
        held=2,
        soak=10,
        replays=0,
        reentrant=0,
        repeats=3,
        processes=1,
        gradient_rounds=1,
        descent=0,
        modes=False,
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
        shapes=8,
        layouts=len(LAYOUTS),
        dtypes=3,
        all_specials=True,
        history=8,
        held=4,
        soak=100,
        replays=3,
        reentrant=200,
        repeats=10,
        processes=2,
        gradient_rounds=2,
        descent=0,
        modes=True,
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
        shapes=16,
        layouts=len(LAYOUTS),
        dtypes=3,
        all_specials=True,
        history=32,
        held=4,
        soak=1_000,
        replays=3,
        reentrant=2_000,
        repeats=100,
        processes=3,
        gradient_rounds=2,
        descent=200,
        modes=True,
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
