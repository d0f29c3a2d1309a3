"""A candidate is evaluated from its checks to its timing, kernels are built, and evidence is JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.judge.evaluate.regions import diagonal_product
from tests.judge.programs import V, candidate, linear_relu, op, spec
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Accepted, Candidate, Contract, Region, Rejected, Target
from torch_cudal1.ir.schedule import INDUCTOR_GRAPH
from torch_cudal1.judge import (
    BaselineRanking,
    EvaluationConfig,
    build_candidates,
    evaluate_candidate,
    make_evidence,
    pool_scope,
    rank_baselines,
    summarise_evaluation,
)
from torch_cudal1.judge.evaluate import evaluator
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.kernels import Proposal, propose

CPU = torch.device("cpu")

CONFIG = EvaluationConfig(Settings(), Contract(), CPU)

TARGET = Target("cuda", "sm_90", "NVIDIA H200", "13.0", torch.__version__, "")


def test_a_right_and_faster_rewrite_is_accepted_with_its_evidence() -> None:
    telemetry.reset()
    region, broadcast = diagonal_product()
    config = EvaluationConfig(Settings(assume_finite=True), Contract(assume_finite=True), CPU)
    ranking = rank_baselines(region, ("eager",), config)
    assert ranking.best == Candidate(region.program, "eager", "baseline")
    assert ranking.medians_us["eager"] > 0
    evaluation = evaluate_candidate(region, candidate(broadcast, "diag_matmul"), ranking, config)
    assert isinstance(evaluation.decision, Accepted), evaluation.decision
    timing = evaluation.decision.timing
    assert 1.05 <= timing.low <= timing.speedup <= timing.high
    assert timing.baseline == "eager"
    facts = json.loads(json.dumps(make_evidence(evaluation, ranking), allow_nan=False))
    assert facts["timing"]["low"] == timing.low
    assert facts["profile"] == "fast"
    assert {"numerics", "fresh_output", "repeat"} <= {check["name"] for check in facts["checks"]}
    line = json.loads(json.dumps(summarise_evaluation(evaluation), allow_nan=False))
    assert line["decision"] == "accepted"
    assert line["label"] == "diag_matmul -> eager"
    assert telemetry.report().counters["candidates_judged"] == 1


def test_the_compiler_of_a_baseline_in_the_same_process_fails_no_candidate(
    monkeypatch, tmp_path
) -> None:
    """Inductor's pool of threads, started where its cache is cold, lives on in the child that the
    next candidate gets.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    region, broadcast = diagonal_product()
    config = EvaluationConfig(Settings(assume_finite=True), Contract(assume_finite=True), CPU)
    with pool_scope():
        ranking = rank_baselines(region, ("eager", "inductor"), config)
        assert not ranking.failures
        assert (
            ranking.estimate_compile_s(INDUCTOR_GRAPH)
            == ranking.ready_s["inductor"]
            > ranking.ready_s["eager"]
            > 0
        )
        verdict = evaluate_candidate(region, candidate(broadcast), ranking, config).verdict
        assert verdict.passed, verdict.failure


def test_the_same_rewrite_needs_the_users_word_on_finite_values() -> None:
    """inf * 0 in the product spreads NaN over a column of diag(d) @ B; the broadcast keeps it in
    one row.
    """
    region, broadcast = diagonal_product()
    ranking = BaselineRanking(Candidate(region.program, "eager", "baseline"), {"eager": 1.0})
    decision = evaluate_candidate(region, candidate(broadcast), ranking, CONFIG).decision
    assert isinstance(decision, Rejected)
    assert decision.detector == "special"


def test_a_slower_candidate_is_right_but_rejected() -> None:
    region, broadcast = diagonal_product()
    swapped = Region(broadcast, region.roles)
    ranking = BaselineRanking(Candidate(broadcast, "eager", "baseline"), {"eager": 1.0})
    config = EvaluationConfig(Settings(assume_finite=True), Contract(assume_finite=True), CPU)
    evaluation = evaluate_candidate(swapped, candidate(region.program), ranking, config)
    assert evaluation.verdict.passed, evaluation.verdict.failure
    assert isinstance(evaluation.decision, Rejected)
    assert evaluation.decision.detector == "timing"
    assert summarise_evaluation(evaluation)["speedup"] is not None


def test_real_examples_take_part() -> None:
    region = linear_relu()
    examples = tuple(torch.randn(s.shape) for s in region.program.inputs)
    config = EvaluationConfig(Settings(), Contract(), CPU, examples)
    ranking = BaselineRanking(Candidate(region.program, "eager", "baseline"), {"eager": 1.0})
    checks = evaluate_candidate(region, candidate(region.program), ranking, config).verdict.checks
    assert [c for c in checks if c.name == "numerics" and "examples" in c.detail]


def test_the_lock_of_the_gpu_is_not_held_while_a_program_is_compiled(monkeypatch) -> None:
    """Compiling takes seconds, timing tenths of them; a surprise is loaded once more, in a process
    that is started for it.
    """
    region, broadcast = diagonal_product()
    events: list[str] = []

    @contextmanager
    def note_lock(device: torch.device, use: str) -> Iterator[str]:
        events.append("lock")
        yield ""
        events.append("released")

    load, time_program, spawn = Trial.load, evaluator.time_program, evaluator.spawn
    monkeypatch.setattr(evaluator, "lock_gpu", note_lock)
    monkeypatch.setattr(Trial, "load", lambda *arguments: events.append("load") or load(*arguments))
    monkeypatch.setattr(
        evaluator,
        "time_program",
        lambda *arguments: events.append("time") or time_program(*arguments),
    )
    monkeypatch.setattr(
        evaluator, "spawn", lambda *arguments: events.append("process") or spawn(*arguments)
    )
    monkeypatch.setattr(
        "torch_cudal1.judge.evaluate.confirm.is_surprising", lambda score, best: True
    )
    ranking = BaselineRanking(Candidate(region.program, "eager", "baseline"), {"eager": 1.0})
    evaluate_candidate(
        region,
        candidate(broadcast),
        ranking,
        EvaluationConfig(Settings(assume_finite=True), Contract(assume_finite=True), CPU),
    )
    first = events.index("lock")
    assert events[first - 1 : first + 8] == [
        "load",
        "lock",
        "time",
        "released",
        "process",
        "load",
        "load",
        "lock",
        "time",
    ]


def test_kernels_are_built_without_a_gpu_and_a_bad_proposal_is_a_value() -> None:
    pytest.importorskip("triton")
    cuda = spec(64, 512)
    cuda = type(cuda)(cuda.dtype, cuda.shape, cuda.strides, "cuda")
    region = Region(
        Program((cuda,), (op("aten._softmax.default", V(0), -1, False, out=1),), (1,)), ("input",)
    )
    proposals = propose(region.program, 90)
    assert proposals
    built = build_candidates(region, (proposals[0], Proposal("no such family", {})), CONFIG, TARGET)
    assert isinstance(built[0], Candidate), built[0]
    assert built[0].program.launches
    assert built[0].techniques == (proposals[0].family,)
    assert built[0].program.inputs == region.program.inputs
    assert isinstance(built[1], Rejected)
    assert built[1].reason
