"""The whole way: a race of baselines, a candidate judged, kernels built, and evidence that is JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.judge.programs import V, candidate, linear_relu, op, spec, with_steps
from torch_cudal1.core import telemetry
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Accepted, Candidate, Contract, Region, Rejected, Target
from torch_cudal1.ir.schedule import INDUCTOR, INDUCTOR_GRAPH
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
from torch_cudal1.judge.evaluate import baseline_benchmark, evaluator
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.kernels import Proposal, propose

CPU = torch.device("cpu")
JOB = EvaluationConfig(Settings(), Contract(), CPU)
TARGET = Target("cuda", "sm_90", "NVIDIA H200", "13.0", torch.__version__, "")
N = 384


def diagonal_product() -> tuple[Region, Program]:
    """diag(d) @ B: the region as written, and the same as a broadcast (less work by a factor of N)."""
    written = (op("aten.diag_embed.default", V(0), out=2), op("aten.mm.default", V(2), V(1), out=3))
    broadcast = (
        op("aten.unsqueeze.default", V(0), 1, out=2),
        op("aten.mul.Tensor", V(1), V(2), out=3),
    )
    region = Region(Program((spec(N), spec(N, N)), written, (3,)), ("input", "input"), name="diag")
    return region, with_steps(region, *broadcast, output=3)


def test_a_right_and_faster_rewrite_is_accepted_with_its_evidence() -> None:
    telemetry.reset()
    region, broadcast = diagonal_product()
    job = EvaluationConfig(Settings(assume_finite=True), Contract(assume_finite=True), CPU)
    ranking = rank_baselines(region, ("eager",), job)
    assert ranking.best == Candidate(region.program, "eager", "baseline")
    assert ranking.medians_us["eager"] > 0
    judgement = evaluate_candidate(region, candidate(broadcast, "diag_matmul"), ranking, job)
    assert isinstance(judgement.decision, Accepted), judgement.decision
    timing = judgement.decision.timing
    assert 1.05 <= timing.low <= timing.speedup <= timing.high
    assert timing.baseline == "eager"
    facts = json.loads(json.dumps(make_evidence(judgement, ranking), allow_nan=False))
    assert facts["timing"]["low"] == timing.low
    assert facts["profile"] == "fast"
    assert {"numerics", "fresh_output", "repeat"} <= {check["name"] for check in facts["checks"]}
    line = json.loads(json.dumps(summarise_evaluation(judgement), allow_nan=False))
    assert line["decision"] == "accepted"
    assert line["label"] == "diag_matmul -> eager"
    assert telemetry.report().counters["candidates_judged"] == 1


def test_the_compiler_of_a_baseline_in_the_same_process_is_not_held_against_a_candidate(
    monkeypatch, tmp_path
) -> None:
    """Inductor's pool of threads, started where its cache is cold, lives on in the child that the
    next candidate is lent.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    region, broadcast = diagonal_product()
    job = EvaluationConfig(Settings(assume_finite=True), Contract(assume_finite=True), CPU)
    with pool_scope():
        ranking = rank_baselines(region, ("eager", "inductor"), job)
        assert not ranking.failures
        assert (
            ranking.compiling_s(INDUCTOR_GRAPH)
            == ranking.ready_s["inductor"]
            > ranking.ready_s["eager"]
            > 0
        )
        verdict = evaluate_candidate(region, candidate(broadcast), ranking, job).verdict
        assert verdict.passed, verdict.failure


def test_the_same_rewrite_needs_the_users_word_on_finite_values() -> None:
    """inf * 0 in the product spreads NaN over a column of diag(d) @ B; the broadcast keeps it in
    one row.
    """
    region, broadcast = diagonal_product()
    ranking = BaselineRanking(Candidate(region.program, "eager", "baseline"), {"eager": 1.0})
    decision = evaluate_candidate(region, candidate(broadcast), ranking, JOB).decision
    assert isinstance(decision, Rejected)
    assert decision.detector == "special"


def test_a_slower_candidate_is_right_but_rejected() -> None:
    region, broadcast = diagonal_product()
    swapped = Region(broadcast, region.roles)
    ranking = BaselineRanking(Candidate(broadcast, "eager", "baseline"), {"eager": 1.0})
    job = EvaluationConfig(Settings(assume_finite=True), Contract(assume_finite=True), CPU)
    judgement = evaluate_candidate(swapped, candidate(region.program), ranking, job)
    assert judgement.verdict.passed, judgement.verdict.failure
    assert isinstance(judgement.decision, Rejected)
    assert judgement.decision.detector == "timing"
    assert summarise_evaluation(judgement)["speedup"] is not None


def test_real_examples_take_part() -> None:
    region = linear_relu()
    examples = tuple(torch.randn(s.shape) for s in region.program.inputs)
    job = EvaluationConfig(Settings(), Contract(), CPU, examples)
    ranking = BaselineRanking(Candidate(region.program, "eager", "baseline"), {"eager": 1.0})
    checks = evaluate_candidate(region, candidate(region.program), ranking, job).verdict.checks
    assert [c for c in checks if c.name == "numerics" and "examples" in c.detail]


def test_who_races_baselines_holds_the_gpus_timing_lock(monkeypatch) -> None:
    """Two judges that raced side by side would call each other's work the baseline's."""
    region, _ = diagonal_product()
    held: list[str] = []

    @contextmanager
    def exclusive(device: torch.device, use: str) -> Iterator[str]:
        held.append(f"lock of {device}")
        yield ""
        held.append("given back")

    raced = baseline_benchmark._time_slots
    monkeypatch.setattr(baseline_benchmark, "lock_gpu", exclusive)
    monkeypatch.setattr(
        baseline_benchmark, "_time_slots", lambda *given: held.append("raced") or raced(*given)
    )
    rank_baselines(region, ("eager",), JOB)
    assert held == ["lock of cpu", "raced", "given back"]


def test_nobody_waits_for_the_clock_while_a_baseline_is_compiled(monkeypatch) -> None:
    """Compiling takes seconds, timing tenths of them; a surprise is loaded once more, in a process
    that is started for it.
    """
    region, broadcast = diagonal_product()
    happened: list[str] = []

    @contextmanager
    def exclusive(device: torch.device, use: str) -> Iterator[str]:
        happened.append("lock")
        yield ""
        happened.append("given back")

    load, timed, started = Trial.load, evaluator.time_program, evaluator.spawn
    monkeypatch.setattr(evaluator, "lock_gpu", exclusive)
    monkeypatch.setattr(Trial, "load", lambda *given: happened.append("load") or load(*given))
    monkeypatch.setattr(
        evaluator, "time_program", lambda *given: happened.append("time") or timed(*given)
    )
    monkeypatch.setattr(
        evaluator, "spawn", lambda *given: happened.append("process") or started(*given)
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
    first = happened.index("lock")
    assert happened[first - 1 : first + 8] == [
        "load",
        "lock",
        "time",
        "given back",
        "process",
        "load",
        "load",
        "lock",
        "time",
    ]


def test_a_graph_of_what_failed_is_not_tried_again_and_both_say_the_end_of_the_reason(
    monkeypatch,
) -> None:
    """A traceback ends with what went wrong, and compiling a large model twice to hear it again
    costs a minute.
    """
    asked: list[str] = []
    really = baseline_benchmark._try_schedule
    cause = (
        "InductorError: SubprocException\n"
        + "  File x\n" * 400
        + "RuntimeError: Could not find an active GPU backend"
    )

    def tried_schedule(trial, name, *given):
        asked.append(name)
        return (
            (baseline_benchmark._summarise_traceback(cause), None)
            if name == "inductor"
            else really(trial, name, *given)
        )

    monkeypatch.setattr(baseline_benchmark, "_try_schedule", tried_schedule)
    region, _ = diagonal_product()
    ranking = rank_baselines(region, ("inductor", "inductor+graph"), JOB)
    assert asked == ["eager", "inductor"]
    told = "InductorError: SubprocException ... RuntimeError: Could not find an active GPU backend"
    assert ranking.failures == {"inductor": told, "inductor+graph": f"inductor failed: {told}"}
    assert (ranking.best.schedule, set(ranking.medians_us)) == ("eager", {"eager"})
    assert (ranking.compiling_s(INDUCTOR), set(ranking.ready_s)) == (0.0, {"eager"})


def test_inductor_races_and_a_schedule_that_cannot_run_says_why() -> None:
    region = linear_relu()
    ranking = rank_baselines(region, ("inductor", "eager+graph"), JOB)
    assert set(ranking.medians_us) == {"eager", "inductor"}, ranking.failures
    assert "CUDA" in ranking.failures["eager+graph"]
    judgement = evaluate_candidate(
        region, candidate(region.program, "compiled", "inductor"), ranking, JOB
    )
    assert judgement.verdict.passed, judgement.verdict.failure


@pytest.mark.skipif(platform.system() != "Linux", reason="Triton builds on Linux only")
def test_where_drawn_inputs_leave_no_number_the_users_own_are_time_slots() -> None:
    """The logarithm of x - 9 is NaN for whatever the judge draws; without a number nobody's result
    is eager's.
    """
    program = Program(
        (spec(64, 64),),
        (
            op("aten.sub.Tensor", V(0), 9.0, out=1),
            op("aten.log.default", V(1), out=2),
            op("aten.tanh.default", V(2), out=3),
        ),
        (3,),
    )
    region, device = Region(program, ("input",)), torch.device("cpu")
    blind = rank_baselines(region, ("inductor",), EvaluationConfig(Settings(), Contract(), device))
    assert "not eager's" in blind.failures["inductor"]
    own = rank_baselines(
        region,
        ("inductor",),
        EvaluationConfig(Settings(), Contract(), device, examples=(10 + torch.rand(64, 64),)),
    )
    assert not own.failures
    assert set(own.medians_us) == {"eager", "inductor"}


def test_kernels_are_built_without_a_gpu_and_a_bad_proposal_is_a_value() -> None:
    pytest.importorskip("triton")
    cuda = spec(64, 512)
    cuda = type(cuda)(cuda.dtype, cuda.shape, cuda.strides, "cuda")
    region = Region(
        Program((cuda,), (op("aten._softmax.default", V(0), -1, False, out=1),), (1,)), ("input",)
    )
    proposals = propose(region.program, 90)
    assert proposals
    built = build_candidates(region, (proposals[0], Proposal("no such family", {})), JOB, TARGET)
    assert isinstance(built[0], Candidate), built[0]
    assert built[0].program.launches
    assert built[0].techniques == (proposals[0].family,)
    assert built[0].program.inputs == region.program.inputs
    assert isinstance(built[1], Rejected)
    assert built[1].reason
