"""The judge: the only room that runs candidates, and the only one that says "correct" or "faster".

May import `core`, `ir`, `device`, `runtime` and `kernels`: sources, caches and graphs are not its
business. Its folders lie along the trust boundary: `worker/` runs in a candidate's process and holds no
reference, tolerance or verdict; `evaluate/`, `checks/` and `reference/` stay in the parent; both sides
speak `wire/`. Names here are loaded when first asked for: a process that finds its decisions in a cache
never asks. Read `evaluate/evaluator`, `checks/validate`, `worker/session`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_cudal1.device.gpu_lock import working_s
    from torch_cudal1.judge.benchmark.quoted_speedup import round_towards_one
    from torch_cudal1.judge.evaluate.baseline_benchmark import rank_baselines
    from torch_cudal1.judge.evaluate.evaluator import (
        BaselineRanking,
        Evaluation,
        EvaluationConfig,
        build_candidates,
        evaluate_candidate,
        make_evidence,
        prestart_fork_server,
        prestart_worker,
        summarise_evaluation,
        validate_candidate,
    )
    from torch_cudal1.judge.sandbox.worker_pool import pool_scope, run_in_background

__all__ = [
    "BaselineRanking",
    "Evaluation",
    "EvaluationConfig",
    "build_candidates",
    "evaluate_candidate",
    "make_evidence",
    "pool_scope",
    "prestart_fork_server",
    "prestart_worker",
    "rank_baselines",
    "round_towards_one",
    "run_in_background",
    "summarise_evaluation",
    "validate_candidate",
    "working_s",
]

_ELSEWHERE = {
    "round_towards_one": "judge.benchmark.quoted_speedup",
    "run_in_background": "judge.sandbox.worker_pool",
    "pool_scope": "judge.sandbox.worker_pool",
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
