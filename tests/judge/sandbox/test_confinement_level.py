"""The level of a child follows from the probes of a machine and from trust."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import child as child_module
from torch_cudal1.judge.sandbox import probe
from torch_cudal1.judge.sandbox.confine import landlock, seccomp
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan
from torch_cudal1.judge.sandbox.confinement_level import (
    MIN_LEVEL,
    REMEDIES,
    WHAT_IS_NOT_STOPPED,
    WHAT_IS_STOPPED,
    Control,
    ProbeResult,
    choose_level,
)
from torch_cudal1.judge.sandbox.limits import Limits

CPU = torch.device("cpu")

needs_landlock = pytest.mark.skipif(
    not landlock.find_version() or not seccomp.is_supported(),
    reason="no Landlock or no filter here: level 1 only",
)

SCRATCH_NEED = Control("scratch", 0, True, "")


def make_probe(level: int, **failed: int) -> ProbeResult:
    """A probe whose acts came out right, but for those named with their level."""
    right = (Control(f"right {number}", number, True, "") for number in range(1, level + 1))
    wrong = (Control(name, number, False, "it happened") for name, number in failed.items())
    return ProbeResult(level, (SCRATCH_NEED, *right, *wrong))


CHOICES = [  # trust, probes, unsafe -> level, a word of what is missing
    ("own", (make_probe(2),), False, 2, ""),
    ("own", (make_probe(2, TCP=2), make_probe(1)), False, 1, "TCP"),
    ("own", (ProbeResult(2, error="no Landlock"), make_probe(1)), False, 1, "no Landlock"),
    ("own", (ProbeResult(2, error="x"), ProbeResult(1, error="y")), False, 0, "y"),
    ("foreign", (make_probe(3),), False, 3, ""),
    ("foreign", (make_probe(3, TCP=2), make_probe(2)), False, 2, "TCP"),
    ("foreign", (ProbeResult(3, error="no namespaces"), make_probe(2)), False, 2, "no namespaces"),
    (
        "foreign",
        (ProbeResult(3, error="x"), make_probe(2, signals=2), make_probe(1)),
        False,
        0,
        "signals",
    ),
    (
        "foreign",
        (ProbeResult(3, error="x"), make_probe(2, signals=2), make_probe(1)),
        True,
        1,
        "signals",
    ),
    (
        "foreign",
        (ProbeResult(3, error="x"), ProbeResult(2, error="y"), ProbeResult(1, error="z")),
        True,
        0,
        "z",
    ),
    ("foreign", (), False, 0, "nothing was tried"),
]


@pytest.mark.parametrize(("trust", "probes", "unsafe", "level", "word"), CHOICES)
def test_the_choice_follows_from_the_probes(
    trust: str, probes: tuple[ProbeResult, ...], unsafe: bool, level: int, word: str
) -> None:
    choice = choose_level(trust, probes, unsafe=unsafe)  # type: ignore[arg-type]
    assert choice.level == level
    assert word in choice.missing
    assert bool(choice.missing) == bool(word)


def test_one_control_that_does_not_hold_costs_its_level_only() -> None:
    assert make_probe(3).level == 3
    assert make_probe(3, hidden=3).level == 2
    assert make_probe(3, TCP=2).level == 1
    assert make_probe(3, survivors=1).level == 0
    assert ProbeResult(3, (replace(SCRATCH_NEED, ok=False),)).level == 0
    assert ProbeResult(3).level == 0  # nothing tried, nothing reached


def test_every_level_says_what_it_does_not_stop_and_how_to_get_it() -> None:
    assert set(WHAT_IS_NOT_STOPPED) == {0, 1, 2, 3}
    assert set(WHAT_IS_STOPPED) == set(REMEDIES) == {1, 2, 3}
    assert MIN_LEVEL == {"own": 1, "foreign": 2}


@needs_landlock
def test_own_code_that_cannot_start_at_level_2_starts_at_1_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the acts of the probe did not foresee."""
    monkeypatch.setattr(probe, "_KNOWN", {})
    limits = Limits(CPU, 30.0)
    probe.find_levels(limits)
    probe_level = child_module.plan_launch

    def no_room(
        child_limits: Limits, level: int, scratch: Path, variables: dict[str, str], *, watched: bool
    ) -> LaunchPlan:
        plan = probe_level(child_limits, level, scratch, variables, watched=watched)
        return (
            plan if plan.reach is None else replace(plan, rlimits={"AS": 300 << 20})
        )  # enough for Python, not for torch

    monkeypatch.setattr(child_module, "plan_launch", no_room)
    with child_module.Child(limits, Contract()) as child:
        assert child.confinement.level == 1
        assert "level 2" in child.confinement.missing
    assert probe.find_levels(limits)[0].level == 0  # and the next child does not try again
