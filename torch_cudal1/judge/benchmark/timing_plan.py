"""Named timing plans: how many paired samples of what length are taken, when they count as steady,
and how a score is made of them.

Frozen values: `judge.benchmark.protocol` measures by them, `judge.evaluate.decide` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["BUCKETS", "REMEASURED_SPEEDUP", "TIMING_PLANS", "TimingPlan", "TimingProfile"]

TimingProfile: TypeAlias = Literal["fast", "standard", "strict", "train", "cudal1"]
BUCKETS = 7  # CUDA-L1 paper, section 2.4.2: seven consecutive blocks of runs
# CUDA-L1 paper: a speed-up above this is measured again in another process
REMEASURED_SPEEDUP = 3.0
_MAX_WINDOW_ROUNDS = 1_000_000  # the paper's own range ends there


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

    # A plan made with `dataclasses.replace` would otherwise fail in the middle of a measurement.
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
        # A bucket's count is only a bound there: time ends it.
        """Pairs per bucket that a window may hold."""
        return _MAX_WINDOW_ROUNDS // BUCKETS


# `strict`: 280 pairs of 10 ms a sample; the requests for a pair take as long again, so that 700 pairs
# took 100 s (benchmarks/LOG.md, 2026-11-30).
# `train`: runs of 0.25 ms keep a candidate below 0.1 s of GPU time. `cudal1`: 10 runs a block as in
# the released evaluator, unless the window says more; a caller shortens the window with
# `dataclasses.replace` and labels what it quotes.
TIMING_PLANS: dict[TimingProfile, TimingPlan] = {
    "fast": TimingPlan("fast", pairs=8, side_us=20e3, gate="widen", budget_s=10.0),
    "standard": TimingPlan("standard", pairs=25, side_us=100e3, gate="reject", budget_s=60.0),
    "strict": TimingPlan(
        "strict", pairs=40, side_us=400e3, gate="reject", processes=2, outputs=8, budget_s=30.0
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
