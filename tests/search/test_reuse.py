"""An entry that was found is used, judged first or refused, by who vouches for it and where it was
judged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import torch_cudal1
from tests.entries import add_one_to_output, count_runs, entry_for, plant
from tests.signing import allow, make_signer, write_revocations
from torch_cudal1 import judge
from torch_cudal1.api.plan import plan
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, SandboxError
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import compiler_digest, judge_identity
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import (
    DIFFERS_FROM_EAGER,
    Accepted,
    Candidate,
    CheckResult,
    Entry,
    Region,
    Rejected,
    Timing,
    Verdict,
)
from torch_cudal1.ir.schedule import EAGER
from torch_cudal1.judge.evaluate import baseline_benchmark, evaluator
from torch_cudal1.search import baselines, reuse
from torch_cudal1.search.tune import choose
from torch_cudal1.store.cache.local_cache import LocalCache, Stored
from torch_cudal1.store.context import TuneContext, make_context

CPU = torch.device("cpu")
PASSED = Verdict((CheckResult("numerics", True, 1.0, 2.0),))
WRONG = Verdict((CheckResult("numerics", False, 9.0, 2.0, "output 0 is off"),))


@pytest.fixture
def region() -> Region:
    telemetry.reset()
    with torch.no_grad():
        (region,) = capture_regions(nn.ReLU().eval(), (torch.randn(4),))
    return region


@dataclass
class ScriptedJudge:
    """A judge that accepts everything but the schedules it is told to refuse, and keeps what it was
    asked.
    """

    evaluated: list[tuple[Candidate, judge.EvaluationConfig]] = field(default_factory=list)
    checked: list[Candidate] = field(default_factory=list)
    refuses: bool = False
    verdict: Verdict = PASSED
    confined: bool = True

    def rank_baselines(
        self, region: Region, schedules: Any, job: judge.EvaluationConfig
    ) -> judge.BaselineRanking:
        return judge.BaselineRanking(
            Candidate(region.program, "eager", "baseline"), {"eager": 100.0, "inductor": 110.0}, {}
        )

    def evaluate_candidate(
        self,
        region: Region,
        candidate: Candidate,
        ranking: judge.BaselineRanking,
        job: judge.EvaluationConfig,
    ) -> judge.Evaluation:
        if job.trust == "foreign" and not self.confined:
            raise SandboxError("confining", "level 1 is all there is")
        self.evaluated.append((candidate, job))
        if self.refuses:
            return judge.Evaluation(candidate, Rejected("wrong", "numerics"), WRONG)
        return judge.Evaluation(
            candidate, Accepted(Timing(PASSED, "eager", 50.0, 100.0, 2.0, 2.0, 2.0, 14)), PASSED
        )

    def validate_candidate(
        self, region: Region, candidate: Candidate, job: judge.EvaluationConfig
    ) -> Verdict:
        self.checked.append(candidate)
        return self.verdict


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedJudge:
    scripted = ScriptedJudge()
    for name in ("rank_baselines", "evaluate_candidate", "validate_candidate"):
        monkeypatch.setattr(judge, name, getattr(scripted, name))
    return scripted


def put_entry(
    region: Region, root: Path, *, origin: str = "rewrites", judged_by: str = "", **changes: Any
) -> Entry:
    """An entry whose Program is visibly not the region's, put into the folder `root`."""
    entry = entry_for(
        region,
        Candidate(add_one_to_output(region.program), "eager", origin, ("planted",)),
        Settings(cache_dir=root),
    )
    evidence = (
        {**entry.evidence, "attestation": {"judge": judged_by}} if judged_by else entry.evidence
    )
    entry = replace(entry, evidence=evidence, **changes)
    assert isinstance(LocalCache(root).put(entry), Stored)
    return entry


def here(folder: Path, **changes: Any) -> TuneContext:
    """A process whose own cache is empty and that reads `folder`/shared."""
    settings = {
        "cache_dir": folder / "own",
        "read_only_caches": (folder / "shared",),
        "on_miss": "baseline",
        **changes,
    }
    return make_context(CPU, Settings(**settings))


def sign_entry(region: Region, folder: Path, **changes: Any) -> dict[str, Any]:
    """A signed entry in `folder`/shared; the settings of a process that allows the key."""
    put_entry(region, folder / "shared", **changes)
    signer = make_signer(folder)
    assert len(LocalCache(folder / "shared").sign(signer).files) == 1
    return {"publishers": allow(folder / "publishers.toml", team=signer.public)}


# What nobody vouches for
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", ["judge", "signed"])
def test_in_production_an_unknown_entry_is_refused_with_the_reason_and_nothing_is_run(
    region, scripted, tmp_path, trust
):
    put_entry(region, tmp_path / "shared")
    choice = choose(region, here(tmp_path, trust=trust))
    assert (choice.swapped, choice.entry) == (False, None)
    assert "refused" in choice.reason
    assert "nobody signed it" in choice.reason
    assert (scripted.evaluated, scripted.checked) == ([], [])
    (miss,) = [event for event in telemetry.report().events if event.what == "miss"]
    assert "nobody signed it" in str(miss.facts["reason"])
    with pytest.raises(CacheMissError, match="nobody signed it"):
        choose(region, here(tmp_path, trust=trust, on_miss="error"))


def test_a_warm_up_judges_an_unknown_entry_as_a_stranger_s_and_keeps_it_as_its_own(
    region, scripted, tmp_path
):
    put_entry(region, tmp_path / "shared")
    choice = choose(region, here(tmp_path, on_miss="tune"))
    ((candidate, job),) = scripted.evaluated
    assert (job.trust, candidate.origin, candidate.program) == (
        "foreign",
        "elsewhere",
        add_one_to_output(region.program),
    )
    assert choice.swapped
    attested = choice.entry.evidence["attestation"]
    assert set(attested) == {"judge", "tolerance_version", "package", "python", "system"}
    assert (attested["judge"], attested["tolerance_version"]) == (
        judge_identity(),
        choice.entry.contract.version,
    )
    again = choose(region, here(tmp_path, trust="signed"))
    assert (again.swapped, len(scripted.evaluated)) == (True, 1)
    assert telemetry.report().events[-1].facts["vouched_by"] == "this cache"


def test_an_unknown_entry_that_the_judge_refuses_does_not_run(region, scripted, tmp_path):
    put_entry(region, tmp_path / "shared")
    scripted.refuses = True
    choice = choose(region, here(tmp_path, on_miss="tune"))
    assert not choice.swapped
    assert [attempt["reason"] for attempt in choice.entry.tried] == ["wrong"]


def test_under_signed_not_even_a_warm_up_looks_at_an_unknown_entry(region, scripted, tmp_path):
    put_entry(region, tmp_path / "shared")
    assert not choose(region, here(tmp_path, on_miss="tune", trust="signed")).swapped
    assert scripted.evaluated == []
    assert any(
        event.what == "refused" and "nobody signed it" in event.facts["reason"]
        for event in telemetry.report().events
    )


def test_where_a_stranger_s_process_cannot_be_confined_his_entry_is_refused_and_the_search_goes_on(
    region, scripted, tmp_path
):
    put_entry(region, tmp_path / "shared")
    scripted.confined = False
    choice = choose(region, here(tmp_path, on_miss="tune"))
    assert not choice.swapped
    assert "level 1 is all there is" in choice.entry.tried[0]["reason"]


@pytest.mark.parametrize("where", ["own", "shared"])
def test_a_kernel_that_calls_itself_a_baseline_is_not_believed(region, scripted, tmp_path, where):
    # Judged under another torch, an entry is used unjudged only if it is a baseline: that must not
    # be a matter of its word.
    target = replace(here(tmp_path).target, torch="9.9")
    put_entry(region, tmp_path / where, origin="baseline", target=target)
    choice = choose(region, here(tmp_path))
    assert choice.candidate.program == region.program
    assert choice.entry is None
    choose(region, here(tmp_path, on_miss="tune"))
    (candidate,) = [candidate for candidate, _ in scripted.evaluated]
    assert candidate.program == add_one_to_output(region.program), "it was judged before it ran"


def test_a_plan_promises_nothing_from_an_unknown_entry(region, tmp_path):
    put_entry(region, tmp_path / "shared")
    settings = here(tmp_path).settings
    (row, *_) = plan(nn.ReLU().eval(), (torch.randn(4),), settings).rows
    assert (row.cached, row.expected_speedup) == (False, 1.0)


def test_an_accelerated_model_says_that_an_unsigned_folder_was_refused(tmp_path, monkeypatch):
    net, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    with torch.no_grad():
        plant(net, x, tmp_path / "shared", change=add_one_to_output)
        runs, expected = count_runs(monkeypatch), net(x)
        torch_cudal1.accelerate(
            net,
            x,
            cache_dir=tmp_path / "own",
            read_only_caches=(tmp_path / "shared",),
            strictness="error",
        )
        assert torch.equal(net(x), expected)
    assert runs.total == 0
    explanation = torch_cudal1.explain(net)
    assert "nobody signed it" in " ".join(
        [*explanation.left_out, *(region.reason for region in explanation.regions)]
    )


# First use of what another machine judged
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("judged_by", ["", "0123456789abcdef"])
def test_a_signed_entry_is_used_in_production_without_running_a_judge(
    region, scripted, tmp_path, judged_by
):
    choice = choose(region, here(tmp_path, **sign_entry(region, tmp_path, judged_by=judged_by)))
    assert choice.swapped
    assert (scripted.evaluated, scripted.checked) == ([], [])


def test_where_searching_is_allowed_a_signed_entry_is_checked_once_a_machine(
    region, scripted, tmp_path, monkeypatch
):
    rules = sign_entry(region, tmp_path, judged_by="0123456789abcdef")
    for _ in range(3):
        assert choose(region, here(tmp_path, on_miss="tune", **rules)).swapped
    assert (len(scripted.checked), scripted.evaluated) == (1, [])
    monkeypatch.setattr(reuse, "judge_identity", lambda: "f" * 16)
    choose(region, here(tmp_path, on_miss="tune", **rules))
    assert len(scripted.checked) == 2


def test_a_signed_entry_that_is_wrong_on_this_machine_is_not_used_then_or_later(
    region, scripted, tmp_path
):
    rules = sign_entry(region, tmp_path, judged_by="0123456789abcdef")
    scripted.verdict, scripted.refuses = WRONG, True
    assert not choose(region, here(tmp_path, on_miss="tune", **rules)).swapped
    assert len(scripted.checked) == 1
    for path in (tmp_path / "own").rglob("*.safetensors"):
        path.unlink()  # what the search then found
    later = choose(region, here(tmp_path, **rules))
    assert not later.swapped
    assert "wrong on this machine: numerics: output 0 is off" in later.reason
    assert len(scripted.checked) == 1


def test_what_this_machine_judged_is_not_checked_again(region, scripted, tmp_path):
    rules = sign_entry(region, tmp_path, judged_by=judge_identity())
    assert choose(region, here(tmp_path, on_miss="tune", **rules)).swapped
    put_entry(region, tmp_path / "own")
    assert choose(region, here(tmp_path, on_miss="tune")).swapped
    assert scripted.checked == []


def test_a_copied_cache_is_checked_once_although_it_is_the_own_one(region, scripted, tmp_path):
    put_entry(region, tmp_path / "own", judged_by="0123456789abcdef")
    for _ in range(2):
        assert choose(region, here(tmp_path, on_miss="tune")).swapped
    assert len(scripted.checked) == 1


def test_a_machine_that_cannot_judge_uses_a_signed_entry_on_its_publisher_s_word(
    region, scripted, tmp_path, monkeypatch
):
    def cannot(*_: object) -> Verdict:
        raise SandboxError("starting", "no processes left")

    monkeypatch.setattr(judge, "validate_candidate", cannot)
    assert choose(region, here(tmp_path, on_miss="tune", **sign_entry(region, tmp_path))).swapped


# Revocation
# --------------------------------------------------------------------------------------------------------------------


def test_a_revoked_program_is_not_taken_up_again_by_a_search(region, scripted, tmp_path):
    put_entry(region, tmp_path / "shared")
    revoked = write_revocations(
        tmp_path / "revoked.toml", program=add_one_to_output(region.program).digest
    )
    target = replace(here(tmp_path).target, torch="9.9")
    put_entry(region, tmp_path / "own", target=target)
    choice = choose(region, here(tmp_path, on_miss="tune", revoked=revoked))
    assert not choice.swapped
    assert scripted.evaluated == []
    place = here(tmp_path, on_miss="tune", revoked=revoked)
    from torch_cudal1.search.tune import tune

    entry = tune(
        region, place, known=[Candidate(add_one_to_output(region.program), "eager", "rewrites")]
    )
    assert [(attempt["detector"], attempt["reason"]) for attempt in entry.tried] == [
        ("revoked", "found wrong")
    ]
    assert scripted.evaluated == []


# The judge itself
# --------------------------------------------------------------------------------------------------------------


def test_a_stranger_s_program_gets_a_confined_process_of_its_own(region, monkeypatch):
    started = []

    class Seen(evaluator.Child):
        def __init__(self, limits: Any, contract: Any) -> None:
            started.append(limits.trust)
            super().__init__(limits, contract)

    monkeypatch.setattr(evaluator, "Child", Seen)
    job = judge.EvaluationConfig(Settings(), here(Path("none")).contract, CPU, trust="foreign")
    try:
        with judge.pool_scope():
            assert not judge.validate_candidate(
                region, Candidate(add_one_to_output(region.program), "eager", "elsewhere"), job
            ).passed
    except SandboxError as error:
        pytest.skip(f"this machine cannot confine strangers: {error}")
    assert started == ["foreign"]


def test_the_real_judge_lets_a_stranger_s_wrong_kernel_not_run(region, tmp_path, monkeypatch):
    put_entry(region, tmp_path / "shared")
    monkeypatch.setattr(baselines, "list_baseline_schedules", lambda region, place: [EAGER])
    monkeypatch.setattr(baseline_benchmark, "_BUDGET_S", 0.2)
    choice = choose(region, here(tmp_path, on_miss="tune", budget_s=30.0))
    assert not choice.swapped
    (foreign_attempt,) = [
        attempt for attempt in choice.entry.tried if attempt.get("origin") == "elsewhere"
    ]
    assert foreign_attempt["decision"] == "rejected"
    assert foreign_attempt["detector"] != "timing", "it is wrong, not slow"


# What was tuned without Inductor
# ------------------------------------------------------------------------------------------------

NO_COMPILER = "InductorError: no C++ compiler"


@pytest.fixture
def inductor(scripted: ScriptedJudge, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Why Inductor is out of each benchmark from now on; empty it and Inductor runs."""
    failures: dict[str, str] = {}

    def rank_baselines(
        region: Region, schedules: Any, job: judge.EvaluationConfig
    ) -> judge.BaselineRanking:
        medians = {name: 100.0 for name in schedules if name not in failures}
        out = {name: why for name, why in failures.items() if name in schedules}
        return judge.BaselineRanking(Candidate(region.program, "eager", "baseline"), medians, out)

    monkeypatch.setattr(judge, "rank_baselines", rank_baselines)
    monkeypatch.setattr(
        reuse, "compiler_digest", lambda device_type: f"compilers for {device_type}"
    )
    return failures


def searches(region: Region, place: TuneContext) -> int:
    """How many searches it takes to choose for the region now."""
    before = telemetry.report().counters.get("regions_tuned", 0)
    choose(region, place)
    return telemetry.report().counters.get("regions_tuned", 0) - before


def test_what_was_tuned_without_inductor_runs_until_a_search_may_measure_it(
    region, scripted, inductor, tmp_path
):
    inductor["inductor"] = NO_COMPILER
    assert searches(region, here(tmp_path, on_miss="tune")) == 1
    inductor.clear()
    for on_miss in ("baseline", "error"):
        served = choose(region, here(tmp_path, on_miss=on_miss))
        assert served.entry.without_inductor == NO_COMPILER
        assert served.reason.endswith(f"; tuned without Inductor: {NO_COMPILER}")
    assert searches(region, here(tmp_path, on_miss="tune")) == 1
    served = choose(region, here(tmp_path))
    assert (served.entry.without_inductor, "without Inductor" in served.reason) == ("", False)
    assert searches(region, here(tmp_path, on_miss="tune")) == 0


def test_a_choice_that_is_measured_again_is_the_first_candidate(
    region, scripted, inductor, tmp_path
):
    measured_evidence = {
        "baselines_us": {"eager": 100.0},
        "baseline_failures": {"inductor": NO_COMPILER},
    }
    entry = put_entry(region, tmp_path / "own")
    LocalCache(tmp_path / "own").put(
        replace(entry, evidence={**entry.evidence, **measured_evidence})
    )
    assert searches(region, here(tmp_path, on_miss="tune")) == 1
    assert scripted.evaluated[0][0] == entry.choice


def test_where_inductor_never_runs_two_searches_are_enough_until_the_compilers_change(
    region, scripted, inductor, tmp_path, monkeypatch
):
    inductor["inductor"] = NO_COMPILER
    place = here(tmp_path, on_miss="tune")
    assert [searches(region, place) for _ in range(4)] == [1, 1, 0, 0]
    monkeypatch.setattr(reuse, "compiler_digest", lambda device_type: "another one was installed")
    assert [searches(region, place) for _ in range(4)] == [1, 1, 0, 0]


def test_without_any_compiler_one_search_is_enough_until_there_is_one(
    region, scripted, inductor, tmp_path, monkeypatch
):
    inductor["inductor"] = NO_COMPILER
    place = here(tmp_path, on_miss="tune")
    monkeypatch.setattr(reuse, "compiler_digest", lambda device_type: "")
    assert [searches(region, place) for _ in range(2)] == [1, 0]
    monkeypatch.setattr(reuse, "compiler_digest", lambda device_type: "one was installed")
    inductor.clear()
    assert [searches(region, place) for _ in range(2)] == [1, 0]
    assert choose(region, place).entry.without_inductor == ""


@pytest.mark.parametrize(
    ("why", "settings"), [(DIFFERS_FROM_EAGER, {}), (NO_COMPILER, {"without": ("compile",)})]
)
def test_what_another_search_would_not_change_is_not_searched_again(
    region, scripted, inductor, tmp_path, why, settings
):
    inductor["inductor"] = why
    place = here(tmp_path, on_miss="tune", **settings)
    assert [searches(region, place) for _ in range(2)] == [1, 0]
    assert choose(region, place).entry.without_inductor == (
        "the search left it out" if settings else why
    )


def test_a_search_that_left_inductor_out_is_made_up_for_by_one_that_does_not(
    region, scripted, inductor, tmp_path
):
    assert searches(region, here(tmp_path, on_miss="tune", without=("compile",))) == 1
    place = here(tmp_path, on_miss="tune")
    assert [searches(region, place) for _ in range(2)] == [1, 0]
    assert choose(region, place).entry.without_inductor == ""


def test_the_compilers_are_told_by_what_is_installed(tmp_path, monkeypatch):
    def now() -> list[str]:
        compiler_digest.cache_clear()
        return [compiler_digest("cpu"), compiler_digest("cuda")]

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    try:
        with inductor_config.patch(
            {"cpp.cxx": (None, "g++")}
        ):  # pytest's own patch would delete the option when it is undone
            assert now() == ["", ""]
            for name in ("g++", "other", "gcc"):
                (tmp_path / name).write_text("#!/bin/sh")
                (tmp_path / name).chmod(0o755)
            first, for_gpu = now()
            assert "" not in (first, for_gpu)
            assert first != for_gpu
            (tmp_path / "g++").unlink()
            assert now() == ["", for_gpu]
            (tmp_path / "g++").symlink_to(tmp_path / "other")
            assert first not in now()
    finally:
        compiler_digest.cache_clear()
