"""The warm-start benchmark: its counters are evidence, its processes are measured from their start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import bench_warm_start
from benchmarks.bench_warm_start import check_counters, main
from benchmarks.report import load

# (counters of the cold process, of the warm ones, a word of the complaint or "")
COUNTERS: list[tuple[Mapping[str, int], Sequence[Mapping[str, int]], str]] = [
    ({"candidates_built": 3, "candidates_judged": 2}, [{"hits": 1}, {}], ""),
    ({"candidates_built": 3}, [{"candidates_built": 0, "candidates_judged": 0}], ""),
    ({"candidates_built": 3}, [{}, {"candidates_built": 1}], "candidates_built = 1"),
    ({"candidates_built": 3}, [{"candidates_judged": 2}], "candidates_judged = 2"),
    ({}, [{}], "prove nothing"),
    ({"hits": 1}, [{}], "prove nothing"),
]


@pytest.mark.parametrize(("cold", "warm", "complaint"), COUNTERS)
def test_a_warm_process_must_not_search(
    cold: Mapping[str, int], warm: Sequence[Mapping[str, int]], complaint: str
) -> None:
    problem = check_counters(cold, warm)
    assert complaint in problem
    assert bool(problem) == bool(complaint)


def test_eager_is_measured_from_process_start(tmp_path: Path) -> None:
    out = tmp_path / "warm.json"
    arguments = ["--models", "lstm", "--contenders", "eager", "--sizes", "small", "--device", "cpu"]
    code = main([*arguments, "--runs", "1", "--out", str(out)])
    (row,) = load(out)["rows"]
    assert (code, row["status"], row["verified"]) == (0, "ok", True)
    assert row["warm_s"] == pytest.approx(sum(row["stages_s"].values()))
    assert row["stages_s"]["import"] > 0.1  # torch is imported inside the measured time
    assert row["cold_counters"] == {}


def test_a_process_that_fails_is_a_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_warm_start, "CONTENDERS", ("no such contender",))
    out = tmp_path / "warm.json"
    assert (
        main(
            [
                "--models",
                "lstm",
                "--sizes",
                "small",
                "--device",
                "cpu",
                "--runs",
                "1",
                "--out",
                str(out),
            ]
        )
        == 1
    )
    (row,) = load(out)["rows"]
    assert row["status"] == "failed"
    assert "cold process ended with code 2" in row["reason"]


def test_the_total_limit_stops_new_processes(tmp_path: Path) -> None:
    out = tmp_path / "warm.json"
    assert main(["--models", "lstm", "--total-limit-s", "0", "--out", str(out)]) == 1
    assert {row["reason"] for row in load(out)["rows"]} == {
        "cold process not started: the total limit was reached"
    }


def test_a_round_that_would_pass_the_total_limit_is_left_out_for_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(bench_warm_start.time, "monotonic", lambda: now)

    def spawn(*_: object) -> dict[str, object]:
        nonlocal now
        now += 10.0
        stages = {"import": 1.0, "build": 1.0, "first_call": 8.0}
        answer = {
            "first_answer_s": 10.0,
            "stages_s": stages,
            "counters": {},
            "decisions": [],
            "started": [],
            "inductor": {},
        }
        return {**answer, "verified": True, "error_ratio": 1.0, "reason": ""}

    monkeypatch.setattr(bench_warm_start, "_run_process", spawn)
    out = tmp_path / "warm.json"
    options = [
        "--contenders",
        "eager,torch.compile",
        "--runs",
        "9",
        "--total-limit-s",
        "75",
        "--out",
        str(out),
    ]
    assert main(options) == 0
    # 20 s cold, two rounds of 20 s; a third would end at 80
    assert [len(row["warm_runs_s"]) for row in load(out)["rows"]] == [
        2,
        2,
    ]


def make_start(contender: str, cold_s: float, warm_s: float) -> bench_warm_start.Start:
    stages = {"warm_after_import_s": warm_s - 1, "cold_after_import_s": cold_s - 1}
    return bench_warm_start.Start("m", contender, "ok", cold_s=cold_s, warm_s=warm_s, **stages)


def test_goals_compare_first_answers_with_those_of_torch_compile() -> None:
    rows = [
        make_start("torch.compile", 19.0, 7.0),
        make_start("cudal1.accelerate", 40.0, 3.0),
        make_start("cudal1 backend", 40.0, 8.0),
    ]
    accelerate, backend = bench_warm_start.compare_with_compile(rows)
    assert accelerate["not_later_than_warm_compile"]
    assert accelerate["sooner_than_cold_compile"] == pytest.approx(19 / 3)
    assert accelerate["sooner_than_cold_compile_after_import"] == pytest.approx(9.0)
    assert not backend["not_later_than_warm_compile"]


def test_a_process_that_fell_back_was_not_served_from_its_cache() -> None:
    served = {"counters": {"entries_reused": 1}, "decisions": []}
    failed = {
        "counters": {"fallbacks": 1},
        "decisions": ["judge baselines {}", "bind fallback {'reason': 'no compiler'}"],
    }
    assert bench_warm_start.find_fallback([served, failed]).endswith(
        "1 times: bind fallback {'reason': 'no compiler'}"
    )
    assert not bench_warm_start.find_fallback([served])


def test_a_process_that_compiled_did_not_start_on_its_cache() -> None:
    cached = {"inductor": {"fxgraph_cache_hit": 2}, "started": ["ptxas", "ldconfig"]}
    assert not bench_warm_start.find_recompilation([cached, cached], offline=True)
    missed = cached | {"inductor": {"fxgraph_cache_hit": 1, "fxgraph_cache_miss": 1}}
    assert (
        bench_warm_start.find_recompilation([cached, missed], offline=False)
        == "a warm process had Inductor compile 1 graphs again"
    )
    compiling = cached | {"started": ["g++"]}
    assert (
        bench_warm_start.find_recompilation([compiling], offline=True)
        == "a warm process started g++"
    )
    assert not bench_warm_start.find_recompilation([compiling], offline=False)


def test_the_error_of_a_process_is_kept_rather_than_the_advice_after_it() -> None:
    errors = "Traceback\n  File x\ntorch._dynamo.exc.BackendCompilerFailed: no compiler\n\nSet TORCHDYNAMO_VERBOSE=1 for more"
    assert (
        bench_warm_start._find_error_line(errors)
        == "torch._dynamo.exc.BackendCompilerFailed: no compiler"
    )
    assert bench_warm_start._find_error_line("killed\n") == "killed"
