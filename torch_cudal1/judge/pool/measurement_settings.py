"""`MeasurementSettings`: the settings with which all slots of an evaluator measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS, TimingPlan
from torch_cudal1.judge.pool.score import ScoreRule
from torch_cudal1.judge.sandbox.limits import Trust

__all__ = ["MeasurementSettings"]

# For the wall clock. Samples of 0.4 ms differed by 30 % with the host's jitter, and no short
# program had a score; samples of 2 ms differ by 3 %.
_SIDE_US = 8_000.0
# Of samples in a bucket.
_PAIRS = 4
# For the GPU's own clock, which varies by 1 % where a busy host's varies by 10 %. Short, since
# queueing a call takes longer on the host than running it on the GPU, and all other slots wait.
_QUEUED_PAIRS, _QUEUED_SIDE_US = 2, 160.0


@dataclass(frozen=True)
class MeasurementSettings:
    """How programs are measured.

    - folder: for the lock files of the GPU. gradients: also check gradients.
    - baseline: the denominator of a speed-up: eager (as in the paper), or the fastest of eager,
      Inductor and CUDA graphs.
    - rule: which variance of the seven buckets is too large for a score, see `score.score_of`.
    - trust: "own" for programs rendered from this package's templates: their process is used again
      while nothing went wrong in it. Programs by a language model are "foreign", and get one each.
    - forked: fork candidates' processes from a fork server.
    - mps: slots for own programs share the GPU through an MPS server where this machine has one:
      19 programs a second instead of 9 on an H200.
    """

    settings: Settings
    contract: Contract
    device: torch.device
    folder: Path
    gradients: bool = False
    baseline: Literal["eager", "best"] = "eager"
    rule: ScoreRule = "strict"
    trust: Trust = "foreign"
    forked: bool = True
    mps: bool = True

    @property
    def plan(self) -> TimingPlan:
        """The judge's `train` plan with the sample sizes above."""
        # gate, rounds: `rule` decides which buckets are too far apart, and a slot repeats the whole
        # benchmark instead of a round.
        plan = replace(
            TIMING_PLANS["train"], pairs=_PAIRS, side_us=_SIDE_US, gate="widen", rounds=1
        )
        return replace(plan, pairs=_QUEUED_PAIRS, side_us=_QUEUED_SIDE_US) if self.queued else plan

    @property
    def queued(self) -> bool:
        """Whether the GPU's own time counts, without the host's."""
        # A launch from Python takes 45 to 80 us on the host, kernels 15 to 60 us on the GPU, and
        # the host is busy. Only for own programs, as the child reports this time; foreign ones are
        # timed by the judge's wall clock.
        return self.device.type == "cuda" and self.trust == "own"

    @property
    def together(self) -> bool:
        """Whether reference and program are timed in one process."""
        # In one process the GPU need not switch contexts for each sample. A foreign program could
        # disturb a reference in its process.
        return self.trust == "own" and self.baseline == "eager"
