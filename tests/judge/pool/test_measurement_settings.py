"""Which clock counts, and in which process a reference is timed, follows from device and trust."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.sandbox.limits import Trust

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FOREIGN_ON_CPU = MeasurementSettings(Settings(), Contract(), CPU, Path("locks"))


@pytest.mark.parametrize(
    ("device", "trust", "queued"),
    [(CUDA, "own", True), (CUDA, "foreign", False), (CPU, "own", False), (CPU, "foreign", False)],
)
def test_only_own_programs_on_a_gpu_are_timed_by_its_clock(
    device: torch.device, trust: Trust, queued: bool
) -> None:
    settings = replace(FOREIGN_ON_CPU, device=device, trust=trust)
    assert settings.queued is queued
    # the host's clock varies more than the GPU's, so its samples are longer
    assert (settings.plan.side_us < 1_000.0) is queued


def test_a_foreign_program_never_shares_a_process_with_its_reference() -> None:
    assert not FOREIGN_ON_CPU.together
    assert replace(FOREIGN_ON_CPU, trust="own").together
    assert not replace(FOREIGN_ON_CPU, trust="own", baseline="best").together


def test_a_measurement_takes_one_round_and_never_refuses_by_itself() -> None:
    plan = FOREIGN_ON_CPU.plan
    assert (plan.rounds, plan.gate) == (1, "widen")
