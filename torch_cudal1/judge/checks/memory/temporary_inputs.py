"""Check `temporary_inputs`: arguments that nothing but the call holds, as `module(f(x))` and
`module(batch[i])` have them. Their memory may be somebody else's all the same.
"""

from __future__ import annotations

from functools import partial

from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.agreement import (
    Agreement,
    compare_result,
    disagree_on_error,
    eager_refuses,
    get_source_reference,
    report_not_applicable,
    require_unwritten,
    summarise,
)
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.wire.call_spec import RunMode

__all__ = ["TEMPORARY_INPUTS", "check_temporary_inputs"]

_QUESTIONS = {"view": "a temporary view", "alias": "a temporary tensor"}


def check_temporary_inputs(trial: Trial) -> list[CheckResult]:
    """Calls with temporary views and temporary tensors: the results are right, and what they are
    views of stays as it was.
    """
    if get_source_reference(trial) is None:
        return report_not_applicable("temporary_inputs", "a Program holds no Python objects")
    agreements: list[Agreement | None] = []
    for kind, question in _QUESTIONS.items():
        agreements.append(disagree_on_error(trial, question, partial(_compare, trial, kind)))
        if agreements[-1] is not None and agreements[-1].problem:
            break
    return summarise("temporary_inputs", agreements, "eager refuses the inputs")


def _compare(trial: Trial, kind: str) -> Agreement:
    question = _QUESTIONS[kind]
    # A module of its own, which has met no other call: a copy may have been made by then.
    aside = trial.load_in_slot(trial.reference, f"candidate {question}", RunMode(temporaries=kind))
    agreement = Agreement(question)
    # Twice: a first call may prepare, and behave in later ones.
    for _ in range(2):
        # A set of its own, as it may come back changed.
        sample = aside.derive_sibling(aside.draw("normal"))
        if not eager_refuses(sample):
            agreement = compare_result(aside, sample, aside.run(sample), question)
            agreement = require_unwritten(aside, sample, agreement)
        aside.drop(sample)
        if agreement.problem:
            break
    return agreement


TEMPORARY_INPUTS = CheckSpec(
    name="temporary_inputs",
    run=check_temporary_inputs,
    asks=(
        "arguments that nothing but the call holds, as views and as tensors: is the result right, "
        "and the memory behind them as before"
    ),
)
