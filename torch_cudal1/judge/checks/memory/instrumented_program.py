"""A candidate's Program in a second slot of its process, run step by step by the Python executor,
which can leave out launches, fill fresh memory and place redzones.

Checks of memory share it. It judges nothing.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from torch_cudal1.ir.program import Call, Launch, Program
from torch_cudal1.judge.reference.region_reference import Outputs
from torch_cudal1.judge.reference.source_reference import SourceCandidate
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure
from torch_cudal1.judge.wire.transport import write_payloads
from torch_cudal1.judge.worker.guard_pages import Side

__all__ = ["SLOT", "Content", "count_launches", "instrument", "require_all_outputs"]

Content: TypeAlias = int | Literal["noise"]  # what memory is filled with: a byte, or numbers


SLOT = "instrumented"


def count_launches(program: Program) -> int:
    # Launches of nested Programs count where they are called.
    nested = sum(count_launches(step.program) for step in program.steps if isinstance(step, Call))
    return nested + sum(isinstance(step, Launch) for step in program.steps)


def instrument(
    trial: Trial,
    *,
    skip: int = -1,
    fill: Content | None = None,
    seed: int | None = None,
    side: Side | None = None,
) -> None:
    """The candidate's Program, run by the Python executor of the child, in a slot of its own."""
    # A source launches its kernels itself: the Python executor has none of its steps.
    assert not isinstance(trial.candidate, SourceCandidate)
    program = trial.candidate.program
    fields: dict[str, Any] = {
        "program": program.to_json(),
        "payloads": write_payloads(program, trial.child.reserve_file()),
    }
    trial.child.call("instrument", slot=SLOT, skip=skip, fill=fill, seed=seed, side=side, **fields)


def require_all_outputs(trial: Trial, outputs: Outputs) -> Outputs:
    # Outputs are compared by position, so a missing one would shift all others.
    if len(outputs) != len(trial.reference.outputs):
        raise CandidateFailure(
            "run",
            f"{len(outputs)} outputs, expected {len(trial.reference.outputs)}",
            "fresh_output",
        )
    return outputs
