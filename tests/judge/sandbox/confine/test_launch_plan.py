"""A launch plan survives the command line."""

from __future__ import annotations

from torch_cudal1.judge.sandbox.confine.landlock import FilesystemAccess
from torch_cudal1.judge.sandbox.confine.launch_plan import LaunchPlan


def test_a_plan_survives_the_command_line() -> None:
    plan = LaunchPlan(
        7,
        "/s",
        FilesystemAccess(("/usr",), ("/x",), ("/s",), ("/dev/null",)),
        61200,
        (2,),
        False,
        True,
        {"CORE": 0},
        300,
    )
    assert LaunchPlan.from_json(plan.to_json()) == plan
    assert LaunchPlan.from_json(LaunchPlan(7, "/s").to_json()) == LaunchPlan(7, "/s")
