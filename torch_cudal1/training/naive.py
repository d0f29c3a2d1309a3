"""The evaluator that can be cheated, for the red-team comparison only: a policy that is rewarded by
it learns to cheat.

Its rule is that of public benchmarks before they were attacked: the reference first and in the same
process, the same input objects for both, a few random inputs, `torch.allclose` at 1e-2, events on
the current stream. Candidates are confined exactly as the judge's are. Its scores may not be
stored, shown as results, or believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from secrets import randbits

import torch

from torch_cudal1.core.errors import TargetError
from torch_cudal1.judge.benchmark.timing_plan import BUCKETS
from torch_cudal1.judge.pool.measured import Decoded, Failure, Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.score import score_of
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.sandbox.fork_server import ForkServer
from torch_cudal1.judge.sandbox.limits import make_limits

__all__ = ["NaiveEvaluator"]

_WORKER = "torch_cudal1.training.naive_worker"
# In front of every failure's detail, so that a row of this evaluator is not mistaken for one of the
# judge's.
_PROBLEM = "naive: "


class NaiveEvaluator:
    """A `records.Evaluator` by a rule that can be cheated. Use it as a context manager, from one
    thread. `trials`: number of random inputs.
    """

    def __init__(self, config: MeasurementSettings, *, trials: int = 5) -> None:
        self.config, self.trials = config, trials
        self._fork_server: ForkServer | None = None

    def __enter__(self) -> NaiveEvaluator:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        if self._fork_server is not None:
            self._fork_server.close()
        self._fork_server = None

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        """One measurement for each program, in order. Raises TargetError, SandboxError."""
        return [self._measure_program(task, program) for program in programs]

    def _measure_program(self, task: TrainingTask, program: Decoded) -> Measured:
        config = self.config
        # Started at the first program: an evaluator that is built and never asked starts no
        # process. Triton is imported once there, since importing it takes seconds in each child.
        if self._fork_server is None and config.forked:
            self._fork_server = ForkServer(("triton",) if config.device.type == "cuda" else ())
        limits = replace(
            make_limits(config.settings, config.device, trust=config.trust),
            threads=torch.get_num_threads(),
        )
        sources = {"reference": task.reference, "candidate": program.source}
        # A new process for each program: caches and patches of one candidate must not be found by
        # the next.
        with Child(limits, config.contract, worker=_WORKER, fork_server=self._fork_server) as child:
            try:
                answer = child.call(
                    "naive",
                    deadline_s=None,
                    # From the system's randomness: a candidate could compute inputs that follow
                    # from a known seed.
                    seed=randbits(31),
                    trials=self.trials,
                    buckets=BUCKETS,
                    **sources,
                )
            # Only a failure of the candidate is its result. TargetError and SandboxError are faults
            # of the task or of the machine, and raise.
            except CandidateFailure as error:
                return Measured(
                    task.id, program.program, "run", detail=f"{_PROBLEM}{error.found}"[:600]
                )
        if problem := answer.get("problem"):
            return Measured(task.id, program.program, "wrong", detail=f"{_PROBLEM}{problem}"[:600])
        return _score_program(task, program, [float(ratio) for ratio in answer["ratios"]])


def _score_program(task: TrainingTask, program: Decoded, means: list[float]) -> Measured:
    try:
        # The rule of the released evaluator: this one is the paper's counterpart, also in its
        # tolerance between buckets.
        score = score_of(means, "cudal1")
    except ValueError as error:
        # The child runs the candidate, which may write anything into its answer.
        raise TargetError(
            task.id, f"the naive evaluator's process answered nonsense: {error}"
        ) from error
    if isinstance(score, float):
        return Measured(task.id, program.program, "ok", score, buckets=tuple(means))
    failure: Failure = "unstable"
    return Measured(task.id, program.program, failure, detail=f"{_PROBLEM}{score.reason}")
