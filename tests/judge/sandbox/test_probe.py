"""What is believed of the sandbox was tried: each control stops an act that happens without it; the
choice follows from that.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox import child as child_module
from torch_cudal1.judge.sandbox import probe, start
from torch_cudal1.judge.sandbox.confine import acts, landlock, seccomp
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
from torch_cudal1.judge.sandbox.filesystem_policy import allow_access, make_environment
from torch_cudal1.judge.sandbox.limits import Limits, make_limits

CPU = torch.device("cpu")
FOREIGN = Limits(CPU, 30.0, trust="foreign", phase="run")
able = pytest.mark.skipif(
    not landlock.find_version() or not seccomp.is_supported(),
    reason="no Landlock or no filter here: level 1 only",
)
MAY_FAIL_ANYWAY = {
    "ptrace",
    "new namespaces",
    "hidden network",
    "the judge's memory",
}  # a machine may forbid these to everybody
NEED = Control("scratch", 0, True, "")


def seen(asked: int, **wrong: int) -> ProbeResult:
    """A probe whose acts came out right, but for those named with their level."""
    right = [NEED, *(Control(f"right {level}", level, True, "") for level in range(1, asked + 1))]
    return ProbeResult(
        asked,
        (*right, *(Control(name, level, False, "it happened") for name, level in wrong.items())),
    )


@pytest.fixture(scope="module")
def bare() -> ProbeResult:
    """The acts of level 3 in a child of level 1, so that nothing but the machine stops them."""
    plain = probe.plan_launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "plan_launch", lambda limits, level, *rest: plain(limits, 1, *rest))
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
def test_every_forbidden_act_happens_where_nothing_forbids_it(bare: ProbeResult, name: str) -> None:
    found = {control.name: control for control in bare.controls}[name]
    if found.ok and name in MAY_FAIL_ANYWAY:
        pytest.skip(f"this machine forbids it to everybody: {found.detail}")
    assert not found.ok, found
    assert bare.level <= 1


@able
@pytest.mark.parametrize("phase", ["build", "run"])
@pytest.mark.parametrize("trust", ["own", "foreign"])
def test_level_2_comes_out_right(trust: str, phase: str) -> None:
    probed = probe.probe_level(replace(FOREIGN, trust=trust, phase=phase), 2)  # type: ignore[arg-type]
    assert not probed.why
    assert probed.level == 2
    names = {control.name for control in probed.controls}
    assert set(acts.NEEDS) <= names
    assert ("new programs" in names) == (phase == "run")
    assert probed.landlock == landlock.find_version()
    assert len(probed.filter_digest) == 64
    assert (probed.uid == os.getuid()) == (trust == "own" or os.getuid() != 0)


@able
def test_level_3_comes_out_right_or_says_why() -> None:
    probed = probe.probe_level(FOREIGN, 3)
    assert probed.level == 3 or "namespace" in probed.why, probed.why


@able
@pytest.mark.parametrize("broken", ["no files", "no compiler's files"])
def test_a_need_that_is_not_met_costs_the_level(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Landlock that also shuts out what a child needs: it must not count as confinement."""

    def too_narrow(*args: object, **kwargs: object) -> object:
        whole = allow_access(*args, **kwargs)  # type: ignore[arg-type]
        if broken == "no files":
            return replace(
                whole,
                read=tuple(
                    p
                    for p in whole.read
                    if "lib" in p or "/bin" in p or p in ("/usr", "/proc", sys.base_prefix)
                ),
                write=(),
            )
        return replace(
            whole,
            read=(
                *(p for p in whole.read if p not in ("/usr", "/bin")),
                "/usr/lib/x86_64-linux-gnu",
            ),
        )

    monkeypatch.setattr("torch_cudal1.judge.sandbox.start.allow_access", too_narrow)
    probed = probe.probe_level(FOREIGN, 2)
    assert probed.level == 0
    assert probed.why


CHOICES = [  # trust, probes, unsafe -> level, a word of what is missing
    ("own", (seen(2),), False, 2, ""),
    ("own", (seen(2, TCP=2), seen(1)), False, 1, "TCP"),
    ("own", (ProbeResult(2, error="no Landlock"), seen(1)), False, 1, "no Landlock"),
    ("own", (ProbeResult(2, error="x"), ProbeResult(1, error="y")), False, 0, "y"),
    ("foreign", (seen(3),), False, 3, ""),
    ("foreign", (seen(3, TCP=2), seen(2)), False, 2, "TCP"),
    ("foreign", (ProbeResult(3, error="no namespaces"), seen(2)), False, 2, "no namespaces"),
    ("foreign", (ProbeResult(3, error="x"), seen(2, signals=2), seen(1)), False, 0, "signals"),
    ("foreign", (ProbeResult(3, error="x"), seen(2, signals=2), seen(1)), True, 1, "signals"),
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
def test_the_choice_follows_from_what_was_seen(
    trust: str, probes: tuple[ProbeResult, ...], unsafe: bool, level: int, word: str
) -> None:
    choice = choose_level(trust, probes, unsafe=unsafe)  # type: ignore[arg-type]
    assert choice.level == level
    assert word in choice.missing
    assert bool(choice.missing) == bool(word)


def test_one_control_that_does_not_hold_costs_its_level_only() -> None:
    assert seen(3).level == 3
    assert seen(3, hidden=3).level == 2
    assert seen(3, TCP=2).level == 1
    assert seen(3, survivors=1).level == 0
    assert ProbeResult(3, (replace(NEED, ok=False),)).level == 0
    assert ProbeResult(3).level == 0  # nothing tried, nothing reached


def test_every_level_says_what_it_does_not_stop_and_how_to_get_it() -> None:
    assert set(WHAT_IS_NOT_STOPPED) == {0, 1, 2, 3}
    assert set(WHAT_IS_STOPPED) == set(REMEDIES) == {1, 2, 3}
    assert MIN_LEVEL == {"own": 1, "foreign": 2}


@pytest.fixture
def poor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Landlock."""
    real = probe.probe_level

    def measured(limits: Limits, level: int) -> ProbeResult:
        return (
            real(limits, 1) if level == 1 else ProbeResult(level, error="Landlock is switched off")
        )

    monkeypatch.setattr(probe, "probe_level", measured)
    monkeypatch.setattr(probe, "_KNOWN", {})


@pytest.mark.usefixtures("poor")
def test_below_level_2_strangers_code_is_refused_with_the_reason_and_the_way_out() -> None:
    with pytest.raises(
        SandboxError,
        match=r"must reach level 2.*Landlock is switched off.*lsm=landlock.*unsafe_sandbox",
    ):
        child_module.Child(make_limits(Settings(), CPU, trust="foreign"), Contract())


@pytest.mark.usefixtures("poor")
def test_an_explicit_setting_allows_it_and_the_evidence_says_so() -> None:
    with child_module.Child(
        make_limits(Settings(unsafe_sandbox=True), CPU, trust="foreign"), Contract()
    ) as child:
        told = child.confinement.to_json()
    assert told["unsafe"] is True
    assert told["level"] == 1
    assert "Landlock is switched off" in told["missing"]
    assert told["filter_digest"] == ""


@pytest.mark.usefixtures("poor")
def test_own_code_makes_do_with_level_1_and_says_why() -> None:
    with child_module.Child(make_limits(Settings(), CPU), Contract()) as child:
        assert child.confinement.level == 1
        assert not child.confinement.unsafe
        assert "Landlock is switched off" in child.confinement.missing


@able
def test_own_code_that_cannot_start_at_level_2_starts_at_1_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the acts of the probe did not foresee."""
    monkeypatch.setattr(probe, "_KNOWN", {})
    limits = Limits(CPU, 30.0)
    probe.find_levels(limits)
    real = child_module.plan_launch

    def no_room(
        given: Limits, level: int, scratch: Path, variables: dict[str, str], *, watched: bool
    ) -> LaunchPlan:
        plan = real(given, level, scratch, variables, watched=watched)
        return (
            plan if plan.reach is None else replace(plan, rlimits={"AS": 300 << 20})
        )  # enough for Python, not for torch

    monkeypatch.setattr(child_module, "plan_launch", no_room)
    with child_module.Child(limits, Contract()) as child:
        assert child.confinement.level == 1
        assert "level 2" in child.confinement.missing
    assert probe.find_levels(limits)[0].level == 0  # and the next child does not try again


def test_what_was_seen_is_remembered_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe.find_levels(FOREIGN)
    monkeypatch.setattr(probe, "probe_level", lambda *_: pytest.fail("tried again"))
    assert probe.find_levels(FOREIGN) is first


def test_strangers_see_neither_homes_nor_the_users_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    scratch = tmp_path / "scratch"
    for own in (True, False):
        told = make_environment(scratch, own=own, visible_gpu=False)
        left = allow_access(scratch, told, own=own, gpu=False)
        assert (str(tmp_path) in told["PYTHONPATH"].split(":")) == own
        assert (str(tmp_path) in left.read) == own
        assert "/etc" not in left.read
        assert "/" not in left.read
        assert (told["HOME"] == str(scratch)) != own
    assert left.write == (str(scratch),)


def test_a_home_is_never_readable_because_a_tool_lies_in_it(tmp_path: Path) -> None:
    variables = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}/bin:{tmp_path}:/",
        "CC": f"{tmp_path}/cc",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "i"),
    }
    left = allow_access(tmp_path / "scratch", variables, own=True, gpu=False)
    assert str(tmp_path) not in left.read
    assert "/" not in left.read
    assert f"{tmp_path}/bin" in left.read


def test_strangers_may_read_the_compiler_wherever_it_is_installed_but_no_home_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, installed, linked = tmp_path / "home", tmp_path / "opt" / "gcc", tmp_path / "links"
    for folder in (home / "bin", installed / "bin", linked):
        folder.mkdir(parents=True)
    for tool in (home / "bin" / "gcc", installed / "bin" / "g++-13"):
        tool.write_text("")
        tool.chmod(0o755)
    (linked / "g++").symlink_to(installed / "bin" / "g++-13")
    monkeypatch.setattr(Path, "home", lambda: home)
    variables = {"PATH": f"{linked}:{home}/bin", "HOME": str(tmp_path / "scratch")}
    left = allow_access(tmp_path / "scratch", variables, own=False, gpu=False)
    assert str(installed) in left.read
    assert str(home) not in left.read


STARTS_LIKE_CUDA = """
import os, sys
if (worker := os.fork()) == 0:
    with open("/proc/self/comm", "w") as name:
        name.write("cuda")
    os._exit(0)
sys.exit(bool(os.waitpid(worker, 0)[1]))
"""


@able
@pytest.mark.parametrize("trust", ["own", "foreign"])
def test_what_code_of_ours_starts_may_start_the_gpu_s_driver_too(
    trust: str, tmp_path: Path
) -> None:
    """CUDA writes into the /proc folder of its process. Inductor's compile workers are processes of
    a child, and ask CUDA.
    """
    scratch = start.make_scratch("cudal1-test-")
    try:
        limits = Limits(torch.device("cuda"), 30.0, trust=trust)  # type: ignore[arg-type]
        variables = make_environment(scratch, own=trust == "own", visible_gpu=True)
        plan = start.plan_launch(limits, 2, scratch, variables)
        with (tmp_path / "log").open("wb") as log:
            process = start.launch_process(
                plan,
                [sys.executable, "-S", "-P", "-c", STARTS_LIKE_CUDA],
                variables,
                fds=(),
                log=log,
            )
            status = process.wait(60)
            start.end_process(process)
        assert (status == 0) == (trust == "own"), (tmp_path / "log").read_text()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.parametrize("fails_in", ["nowhere", "here", "a process started here"])
def test_the_gpu_must_be_usable_in_processes_that_a_compiler_starts(
    fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.getpid()

    def use() -> str:
        if fails_in != "nowhere" and (fails_in == "here") == (os.getpid() == here):
            raise OSError(5, "cuInit answered 304")
        return "used"

    monkeypatch.setattr(acts.gpu, "use_gpu", use)
    asked = acts.ProbeTargets(
        "", "", 0, 0, "", "", 0, "", "", "", gpu=True, own=True, run=False, level=2
    )
    happened, told = acts._tried(acts.NEEDS["GPU"], asked)
    assert happened == (fails_in == "nowhere"), told
    assert acts._tried(acts.NEEDS["GPU"], replace(asked, own=False))[0] == (
        fails_in != "here"
    )  # strangers start no compiler for it
