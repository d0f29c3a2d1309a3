"""Under what programs are measured: the settings of every lane of an evaluator, as a value."""

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

# On the wall: samples of 0.4 ms differ by 30 % with the host's jitter, so that no short program had
# a score; of 2 ms by 3 %.
_SIDE_US = 8_000.0
_PAIRS = 4  # of samples in a bucket
# The GPU's own clock varies by 1 % where that of a busy host does by 10 %. Queueing a call takes
# more of the host than running it does of the GPU, and everybody waits for a race: so it is short.
_QUEUED_PAIRS, _QUEUED_SIDE_US = 2, 160.0


@dataclass(frozen=True)
class MeasurementSettings:
    """Under what programs are measured.

    `baseline`: what a speed-up is over: eager (the paper) or the best of eager, Inductor and CUDA
    graphs. `rule`: which variance of the seven buckets is too large for a score, see
    `reward.score_of`. `trust`: "own" for programs that our templates render: their process is used
    again while nothing went wrong in it; what a language model writes is "foreign" and has a
    process for itself. `folder`: for the locks of the GPU. `mps`: lanes for our own programs share
    the GPU through an MPS server where this machine has one, which is twice as fast.
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
        """The judge's `train` plan; which buckets are too far apart the rule says, and another race
        is as good as another round.
        """
        plan = replace(
            TIMING_PLANS["train"], pairs=_PAIRS, side_us=_SIDE_US, gate="widen", rounds=1
        )
        return replace(plan, pairs=_QUEUED_PAIRS, side_us=_QUEUED_SIDE_US) if self.queued else plan

    @property
    def queued(self) -> bool:
        """Whether the GPU's own time counts, host time left out: a launch from Python takes 45 to
        80 us of the host where kernels take 15 to 60 us of the GPU, and the host is busy. Of our
        own templates only, for the child's word is taken for it; a stranger's program is timed on
        the wall.
        """
        return self.device.type == "cuda" and self.trust == "own"

    @property
    def together(self) -> bool:
        """Whether reference and program are timed in one process, which spares the GPU going over
        to another one for each sample. Of our own templates only, and for eager as the baseline.
        """
        return self.trust == "own" and self.baseline == "eager"
