"""A failure of a source candidate costs that candidate only, with a named reason; a right one is timed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.judge.evaluate.linear_sources import (
    HONEST,
    REFERENCE,
    prepend_statements,
    replace_result,
)
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract, Rejected
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan
from torch_cudal1.judge.evaluate import source_evaluator
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.sandbox.child import CandidateFailure

CPU = torch.device("cpu")

# What a candidate does, the detector that refuses it, and a word of the reason.
BAD_CANDIDATES = {
    "does not parse": ("class ModelNew(:", "contract", "does not parse"),
    "is nested too deeply": ("x = " + "(" * 100_000, "contract", "does not parse"),
    "has no ModelNew": ("import torch", "contract", "ModelNew"),
    "imports what is missing": ("import no_such_package\n" + HONEST, "contract", "no_such_package"),
    "ends at import": ("import os\nos._exit(0)\n" + HONEST, "protocol", "exited with status 0"),
    "raises on the second call": (
        prepend_statements(
            "type(self).calls = getattr(type(self), 'calls', 0) + 1\nif self.calls == 2: raise ValueError('twice')"
        ),
        "run",
        "twice",
    ),
    "loses its GPU": (
        prepend_statements("raise torch.AcceleratorError('an illegal memory access')"),
        "run",
        "illegal memory access",
    ),
    "sleeps for ever": (prepend_statements("import time; time.sleep(1e6)"), "resource", "deadline"),
    "returns no tensor": (replace_result("7"), "fresh_output", "0 outputs"),
    "returns another tree": (
        replace_result('[self.linear(x).clamp_min(0), {"rows": x.shape[0]}]'),
        "fresh_output",
        "list",
    ),
}

# What its process is kept from, or what helps it nothing: it is evaluated as if it had not, or
# refused.
HARMLESS = {
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "prints gigabytes": "for _ in range(10): print('PASS ' * 200_000)",
    "forks": "import os, time\nif os.fork() == 0:\n    time.sleep(1e6)",
}

UNUSABLE = {
    "does not parse": ("class Model(:", "SyntaxError"),
    "has no inputs": (REFERENCE.replace("get_inputs", "inputs"), "get_inputs"),
    "returns no tensor": (
        REFERENCE.replace('torch.relu(self.linear(x)), {"rows": x.shape[0]}', "7"),
        "no tensor",
    ),
    "cannot be called": (REFERENCE.replace("[32]", "[33]"), "shapes"),
}

ABOUT_TIME = {
    "timing",
    "timing_state",
    "unstable",
    "wall_slope",
    "jump",
}  # a busy machine may not be able to tell


@pytest.fixture(scope="module")
def evaluator() -> Iterator[SourceEvaluator]:
    config = SourceEvaluationConfig(Settings(candidate_timeout_s=20.0), Contract(), CPU)
    with SourceEvaluator(config, ahead=True) as running_evaluator:
        yield running_evaluator


@pytest.mark.parametrize("name", BAD_CANDIDATES)
def test_a_bad_candidate_is_refused_with_a_named_reason(
    evaluator: SourceEvaluator, name: str
) -> None:
    source, detector, word = BAD_CANDIDATES[name]
    evaluation = evaluator.evaluate(REFERENCE, source, timed=False)
    assert isinstance(evaluation.decision, Rejected)
    assert (evaluation.decision.detector, evaluation.timing) == (detector, None), (
        evaluation.decision
    )
    assert word in evaluation.decision.reason


@pytest.mark.parametrize(("seconds", "word"), [(0.3, ""), (1e6, "together")])
def test_validation_ends_within_its_limit(
    monkeypatch: pytest.MonkeyPatch, seconds: float, word: str
) -> None:
    """Whether many checks take long or a single request does."""
    monkeypatch.setitem(source_evaluator._VALIDATION_LIMIT_S, "fast", 15.0)
    slow = prepend_statements(f"import time; time.sleep({seconds})")
    config = SourceEvaluationConfig(Settings(candidate_timeout_s=600.0), Contract(), CPU)
    with SourceEvaluator(config) as evaluator:
        decision = evaluator.evaluate(REFERENCE, slow, timed=False).decision
    assert isinstance(decision, Rejected)
    assert decision.detector == "resource", decision
    assert word in decision.reason


@pytest.mark.parametrize("name", HARMLESS)
def test_a_candidate_that_reaches_outside_its_process_does_no_harm(
    evaluator: SourceEvaluator, name: str
) -> None:
    evaluation = evaluator.evaluate(REFERENCE, prepend_statements(HARMLESS[name]), timed=False)
    assert evaluation.confinement is not None
    assert evaluation.confinement.level >= 2
    assert isinstance(evaluation.decision, Rejected)
    assert evaluation.decision.reason


def test_the_next_candidate_meets_clean_processes_and_the_same_oracle(
    evaluator: SourceEvaluator,
) -> None:
    evaluation = evaluator.evaluate(REFERENCE, HONEST)
    refused = {check.name for check in evaluation.verdict.checks if not check.passed}
    assert refused <= ABOUT_TIME, evaluation.verdict.failure
    assert evaluation.baselines is not None
    assert "eager" in evaluation.baselines.medians_us
    assert "timing" in evaluation.elapsed_s
    next_evaluation = evaluator.evaluate(REFERENCE, replace_result("x, {}"), timed=False)
    assert "reference" not in next_evaluation.elapsed_s
    assert next_evaluation.verdict.failure is not None


def test_a_process_that_died_while_it_waited_fails_no_candidate(
    evaluator: SourceEvaluator,
) -> None:
    evaluator.evaluate(REFERENCE, replace_result("x, {}"), timed=False)
    assert evaluator._processes._next is not None
    os.kill(evaluator._processes._next.result().pid, signal.SIGKILL)
    time.sleep(1.0)  # until what it supervised is gone too
    assert evaluator.evaluate(REFERENCE, HONEST, timed=False).verdict.failure is None


def test_gradients_are_checked_unless_the_configuration_leaves_them_out(
    evaluator: SourceEvaluator,
) -> None:
    detached = replace_result('self.linear(x).clamp_min(0).detach(), {"rows": x.shape[0]}')
    failure = evaluator.evaluate(REFERENCE, detached, timed=False).verdict.failure
    assert failure is not None
    assert failure.name == "grad"
    with SourceEvaluator(replace(evaluator.config, gradients=False)) as other:
        assert other.evaluate(REFERENCE, detached, timed=False).verdict.failure is None


FOR_ITS_FORM_ONLY = {
    "refuses other layouts": prepend_statements(
        "if not x.is_contiguous(): raise ValueError('rows only')"
    ),
    "is wrong in other layouts": prepend_statements("x = x.as_strided(x.shape, (x.shape[1], 1))"),
    "is wrong for other rows": prepend_statements("if x.shape[0] != 16: x = x * 2"),
    "is wrong in train mode": prepend_statements("x = x * (2 if self.training else 1)"),
}


@pytest.mark.parametrize("name", FOR_ITS_FORM_ONLY)
def test_a_candidate_for_inference_on_one_form_is_checked_on_no_other(
    evaluator: SourceEvaluator, name: str
) -> None:
    candidate = FOR_ITS_FORM_ONLY[name]
    with SourceEvaluator(replace(evaluator.config, gradients=False, drop_in=False)) as other:
        assert other.evaluate(REFERENCE, candidate, timed=False).verdict.failure is None
    failure = evaluator.evaluate(REFERENCE, candidate, timed=False).verdict.failure
    if name == "refuses other layouts":  # an error misleads no caller
        assert failure is None
    else:
        assert failure is not None
        assert failure.name in ("layouts", "shapes", "mode", "grad")


def test_a_wrong_result_on_its_own_form_is_refused_whatever_its_purpose(
    evaluator: SourceEvaluator,
) -> None:
    with SourceEvaluator(replace(evaluator.config, gradients=False, drop_in=False)) as other:
        failure = other.evaluate(
            REFERENCE,
            replace_result('self.linear(x).clamp_min(1e-3), {"rows": x.shape[0]}'),
            timed=False,
        ).verdict.failure
    assert failure is not None
    assert failure.name == "numerics"


SHRINKING = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.softshrink(x, 0.25)

def get_inputs(): return [torch.randn(16, 32)]
def get_init_inputs(): return []
"""


@pytest.mark.parametrize("swallows", [True, False])
def test_special_values_are_right_as_eager_or_as_inductor_has_them(
    evaluator: SourceEvaluator, swallows: bool
) -> None:
    """Of a NaN, softshrink makes a NaN in eager and 0 in what Inductor compiles for a CPU."""
    body = SHRINKING.replace("Model(", "ModelNew(").split("def get_inputs")[0]
    result = (
        "torch.where(x > 0.25, x - 0.25, torch.where(x < -0.25, x + 0.25, 0.0))"
        if swallows
        else "x - x.clamp(-0.25, 0.25)"
    )
    honest = body.replace("torch.nn.functional.softshrink(x, 0.25)", result)
    assert evaluator.evaluate(SHRINKING, honest, timed=False).verdict.failure is None
    cheat = honest.replace(result, f"torch.nan_to_num({result}, 7.0)")
    failure = evaluator.evaluate(SHRINKING, cheat, timed=False).verdict.failure
    assert failure is not None
    assert failure.name == "special"


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_reference_that_cannot_be_used_fails_no_candidate(
    evaluator: SourceEvaluator, name: str
) -> None:
    source, word = UNUSABLE[name]
    with pytest.raises(ReferenceFailure, match=word):
        evaluator.evaluate(source, HONEST)


@pytest.mark.parametrize(("all_pairs", "margin"), [(False, Settings().margin), (True, None)])
def test_with_all_pairs_the_benchmark_decides_by_no_margin(
    all_pairs: bool, margin: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[TimingPlan] = []

    def note_plan(trial: object, baseline: object, plan: TimingPlan) -> None:
        plans.append(plan)
        raise CandidateFailure("timing", "enough is known", "unstable")

    ranking = SimpleNamespace(best="eager", sets=("first",), medians_us={})
    monkeypatch.setattr(source_evaluator, "time_source", note_plan)
    monkeypatch.setattr(source_evaluator, "name_slot", lambda subject, name: name)
    monkeypatch.setattr(SourceEvaluator, "_rank_baselines", lambda self, bench: (bench, ranking))
    with SourceEvaluator(
        SourceEvaluationConfig(Settings(), Contract(), CPU, all_pairs=all_pairs)
    ) as evaluator:
        failure = evaluator.evaluate(REFERENCE, HONEST).verdict.failure
    assert failure is not None
    assert failure.name == "unstable"
    assert [plan.margin for plan in plans] == [margin]
