"""The judge: the only place that runs candidates, and the only one that says "correct" or "faster".

`court` is the front door; `timing` is used by whoever measures. Sources, caches and graphs are not its business.
"""

from torch_cudal1.judge.court import Job, Judgement, Ranking, begin, build, check, evidence, judge, rank_baselines, tried
from torch_cudal1.judge.decide import conservative
from torch_cudal1.judge.gpu_lock import working_s
from torch_cudal1.judge.heat import Heat, heat
from torch_cudal1.judge.warm import in_background, kept_warm

__all__ = [
    "Heat",
    "Job",
    "Judgement",
    "Ranking",
    "begin",
    "build",
    "check",
    "conservative",
    "evidence",
    "heat",
    "in_background",
    "judge",
    "kept_warm",
    "rank_baselines",
    "tried",
    "working_s",
]
