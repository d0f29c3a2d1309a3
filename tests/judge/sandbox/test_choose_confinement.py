"""On a machine without Landlock foreign code is refused, and own code runs at level 1."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import child as child_module
from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.confinement_level import (
    ProbeResult,
)
from torch_cudal1.judge.sandbox.limits import Limits, make_limits

CPU = torch.device("cpu")


@pytest.fixture
def without_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Landlock."""
    probe_level = probe.probe_level

    def probe_without_landlock(limits: Limits, level: int) -> ProbeResult:
        return (
            probe_level(limits, 1)
            if level == 1
            else ProbeResult(level, error="Landlock is switched off")
        )

    monkeypatch.setattr(probe, "probe_level", probe_without_landlock)
    monkeypatch.setattr(probe, "_KNOWN", {})


@pytest.mark.usefixtures("without_landlock")
def test_below_level_2_foreign_code_is_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(
        SandboxError,
        match=r"must reach level 2.*Landlock is switched off.*lsm=landlock.*unsafe_sandbox",
    ):
        child_module.Child(make_limits(Settings(), CPU, trust="foreign"), Contract())


@pytest.mark.usefixtures("without_landlock")
def test_an_explicit_setting_allows_it_and_the_evidence_says_so() -> None:
    with child_module.Child(
        make_limits(Settings(unsafe_sandbox=True), CPU, trust="foreign"), Contract()
    ) as child:
        confinement = child.confinement.to_json()
    assert confinement["unsafe"] is True
    assert confinement["level"] == 1
    assert "Landlock is switched off" in confinement["missing"]
    assert confinement["filter_digest"] == ""


@pytest.mark.usefixtures("without_landlock")
def test_own_code_makes_do_with_level_1_and_says_why() -> None:
    with child_module.Child(make_limits(Settings(), CPU), Contract()) as child:
        assert child.confinement.level == 1
        assert not child.confinement.unsafe
        assert "Landlock is switched off" in child.confinement.missing
