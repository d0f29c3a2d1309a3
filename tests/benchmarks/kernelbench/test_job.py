"""A job names its columns and its precision, and survives JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.kernelbench.job import LABELS, PROFILES, Job, Rights, get_dtype, set_precision

JOB = Job("cuda:0", PROFILES["quick"])


@pytest.fixture
def precision() -> Iterator[None]:
    """Puts PyTorch's switches back."""
    matmul, conv = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = conv


def test_a_cpu_has_no_cuda_graphs_and_autotuning_must_be_asked_for() -> None:
    assert JOB.baselines == ("eager", "torch.compile", "reduce-overhead", "CUDA graph")
    assert replace(JOB, device="cpu").baselines == ("eager", "torch.compile")
    assert replace(JOB, autotune=True).baselines[-1] == "max-autotune"


def test_withdrawn_columns_are_gone_and_the_others_stay() -> None:
    job = replace(JOB, arms=("only kernels", "only graphs"), judged="h100 0123")
    assert job.contenders == ("cudal1", "only kernels", "only graphs", "CUDA-L1 release")
    smaller = job.withdraw({"cudal1", "only graphs", "CUDA-L1 release", "reduce-overhead"})
    assert smaller.contenders == ("only kernels",)
    assert "reduce-overhead" not in smaller.baselines


def test_every_searched_column_extends_the_time_limit() -> None:
    profile = JOB.profile
    assert JOB.limit_s == profile.limit_s
    longer = replace(JOB, arms=("only kernels",), judged="h100 0123").limit_s
    assert longer == 2 * profile.limit_s + 1.5 * profile.tune_s


@pytest.mark.parametrize(
    "job", [JOB, replace(JOB, arms=("only kernels",)), JOB.withdraw({"reduce-overhead"})]
)
def test_a_job_survives_json(job: Job) -> None:
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_only_one_precision_converts_what_a_task_makes() -> None:
    dtypes = {rights: get_dtype(rights) for rights in LABELS}
    assert {name: dtype for name, dtype in dtypes.items() if dtype} == {"bf16": torch.bfloat16}
    assert replace(JOB, rights="bf16").label == "bfloat16 weights and inputs, for everyone"


def test_sizes_that_were_cut_down_are_in_the_label() -> None:
    assert JOB.label == LABELS["default"]
    assert replace(JOB, scale=8).label.endswith("SIZES CUT DOWN by 8: no result")


@pytest.mark.parametrize(
    ("rights", "matmul", "conv"),
    [
        ("default", "highest", True),
        ("tf32", "high", True),
        ("ieee", "highest", False),
        ("bf16", "highest", True),
    ],
)
def test_rights_are_the_switches_of_pytorch(
    precision: None, rights: Rights, matmul: str, conv: bool
) -> None:
    set_precision(rights)
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cudnn.allow_tf32 == conv
