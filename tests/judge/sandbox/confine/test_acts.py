"""The acts that a probe tries: each happens where nothing forbids it."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.confine import acts
from torch_cudal1.judge.sandbox.confinement_level import (
    ProbeResult,
)
from torch_cudal1.judge.sandbox.limits import Limits

CPU = torch.device("cpu")
FOREIGN = Limits(CPU, 30.0, trust="foreign", phase="run")

MAY_FAIL_ANYWAY = {
    "ptrace",
    "new namespaces",
    "hidden network",
    "the judge's memory",
}  # a machine may forbid these to everybody


@pytest.fixture(scope="module")
def unconfined() -> ProbeResult:
    """The acts of level 3 in a child of level 1, so that nothing but the machine stops them."""
    plan_launch = probe.plan_launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            probe, "plan_launch", lambda limits, level, *rest: plan_launch(limits, 1, *rest)
        )
        patch.setattr(acts.seccomp, "install_filter", lambda *_, **__: None)
        return probe.probe_level(replace(FOREIGN, phase="build"), 3)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (level, _) in acts.ACTS.items()
        if level > 1 and name not in ("new processes", "new programs")
    ],
)
def test_every_forbidden_act_happens_where_nothing_forbids_it(
    unconfined: ProbeResult, name: str
) -> None:
    control = {control.name: control for control in unconfined.controls}[name]
    if control.ok and name in MAY_FAIL_ANYWAY:
        pytest.skip(f"this machine forbids it to everybody: {control.detail}")
    assert not control.ok, control
    assert unconfined.level <= 1


@pytest.mark.parametrize("fails_in", ["nowhere", "here", "a process started here"])
def test_the_gpu_must_be_usable_in_processes_that_a_compiler_starts(
    fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_pid = os.getpid()

    def use_gpu() -> str:
        if fails_in != "nowhere" and (fails_in == "here") == (os.getpid() == test_pid):
            raise OSError(5, "cuInit answered 304")
        return "used"

    monkeypatch.setattr(acts.gpu, "use_gpu", use_gpu)
    targets = acts.ProbeTargets(
        "", "", 0, 0, "", "", 0, "", "", "", gpu=True, own=True, run=False, level=2
    )
    happened, detail = acts._try_act(acts.NEEDS["GPU"], targets)
    assert happened == (fails_in == "nowhere"), detail
    assert acts._try_act(acts.NEEDS["GPU"], replace(targets, own=False))[0] == (
        fails_in != "here"
    )  # foreign code starts no compiler for it
