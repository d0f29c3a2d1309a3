"""On a GPU all schedules are timed, kernels are built and evaluated, and TF32 needs the right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.judge.programs import V, candidate, linear_relu, op
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.ir.records import Accepted, Candidate, Contract, Region, Rejected, Target
from torch_cudal1.ir.schedule import SCHEDULES
from torch_cudal1.judge import (
    BaselineRanking,
    EvaluationConfig,
    build_candidates,
    evaluate_candidate,
    make_evidence,
    rank_baselines,
)
from torch_cudal1.kernels import propose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
CUDA = torch.device("cuda", 0)
CONFIG = EvaluationConfig(Settings(), Contract(), CUDA)


def cuda(*shape: int) -> TensorSpec:
    return replace(TensorSpec.of(torch.empty(shape)), device="cuda")


def target() -> Target:
    major, minor = torch.cuda.get_device_capability()
    return Target(
        "cuda", f"sm_{major}{minor}", torch.cuda.get_device_name(), "", torch.__version__, ""
    )


def product(size: int = 1024) -> Region:
    return Region(
        Program(
            (cuda(size, size), cuda(size, size)), (op("aten.mm.default", V(0), V(1), out=2),), (2,)
        ),
        ("input", "parameter"),
    )


def test_every_schedule_runs_and_one_is_the_fastest() -> None:
    region = linear_relu()
    program = replace(
        region.program, inputs=tuple(replace(s, device="cuda") for s in region.program.inputs)
    )
    schedules = [name for name in SCHEDULES if "autotune" not in name]
    ranking = rank_baselines(replace(region, program=program), schedules, CONFIG)
    assert set(ranking.medians_us) == set(schedules), ranking.failures
    assert ranking.best.schedule in schedules
    evaluation = evaluate_candidate(
        replace(region, program=program),
        candidate(program, "graph", "eager+graph"),
        ranking,
        CONFIG,
    )
    assert evaluation.verdict.passed, evaluation.verdict.failure


def test_inductor_is_timed_where_a_model_has_many_kernels() -> None:
    """With a few of them it compiles in its own process, with many in workers."""
    blocks = [
        nn.Sequential(nn.Linear(64 * i, 64 * i + 64), nn.GELU(), nn.LayerNorm(64 * i + 64))
        for i in range(1, 13)
    ]
    with torch.no_grad():
        (region,) = capture_regions(
            nn.Sequential(*blocks).cuda().eval(), (torch.randn(32, 64, device="cuda"),)
        )
    schedules = [name for name in SCHEDULES if "autotune" not in name]
    ranking = rank_baselines(region, schedules, CONFIG)
    assert set(ranking.medians_us) == set(schedules), ranking.failures


def test_a_built_kernel_is_evaluated_with_its_numbers() -> None:
    region = Region(
        Program((cuda(512, 4000),), (op("aten._softmax.default", V(0), -1, False, out=1),), (1,)),
        ("input",),
    )
    proposals = propose(region.program, 90)[:2]
    programs = build_candidates(region, proposals, CONFIG, target())
    assert all(isinstance(program, Candidate) for program in programs), programs
    ranking = rank_baselines(region, ("eager", "inductor"), CONFIG)
    for program in programs:
        assert isinstance(program, Candidate)
        evaluation = evaluate_candidate(region, program, ranking, CONFIG)
        assert evaluation.verdict.passed, evaluation.verdict.failure
        assert evaluation.timing is not None
        print(evaluation.decision, make_evidence(evaluation, ranking)["timing"])


@pytest.mark.parametrize(("rights", "detector"), [((), "numerics"), (("matmul",), None)])
def test_tf32_inside_needs_the_right(rights: tuple[str, ...], detector: str | None) -> None:
    """Operands rounded to TF32's 10 bits: the error of a tensor-core product, whatever the switches
    say.
    """
    region = product()
    steps, last = [], 2
    for source in (0, 1):
        scaled = op(
            "aten.mul.Tensor", V(source), 8193.0, out=last
        )  # Dekker's split with 2^13 + 1 keeps the upper 11 bits
        rest = op("aten.sub.Tensor", V(last), V(source), out=last + 1)
        steps += [scaled, rest, op("aten.sub.Tensor", V(last), V(last + 1), out=last + 2)]
        last += 3
    rounded = Program(
        region.program.inputs, (*steps, op("aten.mm.default", V(4), V(7), out=8)), (8,)
    )
    config = EvaluationConfig(
        Settings(), Contract(rights=rights, assume_finite=True), CUDA
    )  # the split of an infinity is NaN
    ranking = BaselineRanking(Candidate(region.program, "eager", "baseline"), {"eager": 1.0})
    decision = evaluate_candidate(region, candidate(rounded), ranking, config).decision
    assert not isinstance(decision, Accepted)  # it does more work than the product alone
    assert isinstance(decision, Rejected)
    assert decision.detector == (detector or "timing"), decision


def test_the_users_switches_are_as_before() -> None:
    before = (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    evaluate_candidate(
        product(64),
        candidate(product(64).program),
        BaselineRanking(Candidate(product(64).program, "eager", "baseline"), {}),
        CONFIG,
    )
    assert (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
    ) == before
