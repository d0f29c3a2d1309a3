"""The judge: the only place that runs candidates, and the only one that says "correct" or "faster".

`court` is the front door, `race` finds the fastest baseline; `timing` is used by whoever measures.
Sources, caches and graphs are not its business. What a name stands for is loaded when it is first
asked for: a process that finds its decisions in a cache never asks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_cudal1.device.gpu_lock import working_s
    from torch_cudal1.judge.evaluate.baseline_benchmark import rank_baselines
    from torch_cudal1.judge.evaluate.decide import conservative
    from torch_cudal1.judge.evaluate.evaluator import (
        Job,
        Judgement,
        Ranking,
        begin,
        build,
        check,
        evidence,
        expect,
        judge,
        tried,
    )
    from torch_cudal1.judge.sandbox.worker_pool import in_background, kept_warm

__all__ = [
    "Job",
    "Judgement",
    "Ranking",
    "begin",
    "build",
    "check",
    "conservative",
    "evidence",
    "expect",
    "in_background",
    "judge",
    "kept_warm",
    "rank_baselines",
    "tried",
    "working_s",
]

_ELSEWHERE = {
    "conservative": "judge.evaluate.decide",
    "in_background": "judge.sandbox.worker_pool",
    "kept_warm": "judge.sandbox.worker_pool",
    "rank_baselines": "judge.evaluate.baseline_benchmark",
    "working_s": "device.gpu_lock",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'torch_cudal1.judge' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    # No submodule has a name of these: importing it would put the module in the place of the
    # function.
    value = getattr(
        import_module(f"torch_cudal1.{_ELSEWHERE.get(name, 'judge.evaluate.evaluator')}"), name
    )
    globals()[name] = value
    return value
