"""A row tells what every contender measured or why it does not run, short enough for a results
file.
"""

from __future__ import annotations

import json

from benchmarks.decisions import collect_decisions, describe_explanation
from torch_cudal1.core import telemetry
from torch_cudal1.core.report import Explanation, RegionReport


def test_races_are_told_in_order_and_long_reasons_keep_their_ends() -> None:
    telemetry.reset()
    telemetry.record("resolve", "miss", "key", reason="not told")
    why = "InductorError " + "x" * 5_000 + " no GPU backend"
    telemetry.record(
        "judge",
        "baselines",
        "key",
        best="eager",
        medians_us={"eager": 3.0},
        failures={"inductor": why},
    )
    telemetry.record("judge", "timed", "key", details="not told")
    telemetry.record("judge", "in_place", runs="inductor", speedup=0.9, low=0.8, high=float("inf"))
    race, gate = collect_decisions(telemetry.report())
    assert (race["what"], race["best"], race["medians_us"]) == (
        "baselines",
        "eager",
        {"eager": 3.0},
    )
    reason = race["failures"]["inductor"]
    assert reason.startswith("InductorError")
    assert reason.endswith("no GPU backend")
    assert len(reason) < 600
    assert (gate["stage"], gate["runs"], gate["high"]) == ("judge", "inductor", "inf")
    json.dumps([race, gate], allow_nan=False)


def test_a_region_names_baselines_and_candidates() -> None:
    raced = (
        {"label": "eager+graph", "decision": "runs", "reason": "2.0 us, the fastest baseline"},
    )
    tried = (
        {
            "label": "gemm -> eager",
            "decision": "rejected",
            "reason": "slow",
            "detector": "timing",
            "techniques": ["gemm"],
        },
    )
    region = RegionReport(
        name="net",
        key="k",
        kind="inference",
        granularity="whole",
        runs="eager+graph",
        origin="baseline",
        raced=raced,
        tried=tried,
    )
    told, whole = describe_explanation(
        Explanation(target="Net", device="cuda", regions=(region,), gate=("end to end 1.1x",))
    )
    assert told["runs"] == "eager+graph"
    assert [one["label"] for one in told["contenders"]] == ["eager+graph", "gemm -> eager"]
    assert "techniques" not in told["contenders"][1]
    assert whole == {"stage": "explain", "what": "whole call", "gate": ["end to end 1.1x"]}
