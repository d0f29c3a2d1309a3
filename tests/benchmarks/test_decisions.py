"""A row tells what every contender measured or why it does not run, short enough for a results
file.
"""

from __future__ import annotations

import json

from benchmarks.decisions import collect_decisions, describe_explanation
from torch_cudal1.core import telemetry
from torch_cudal1.core.report import Explanation, RegionReport


def test_events_come_in_order_and_long_reasons_keep_their_ends() -> None:
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
    baselines, end_to_end = collect_decisions(telemetry.report())
    assert (baselines["what"], baselines["best"], baselines["medians_us"]) == (
        "baselines",
        "eager",
        {"eager": 3.0},
    )
    reason = baselines["failures"]["inductor"]
    assert reason.startswith("InductorError")
    assert reason.endswith("no GPU backend")
    assert len(reason) < 600
    assert (end_to_end["stage"], end_to_end["runs"], end_to_end["high"]) == (
        "judge",
        "inductor",
        "inf",
    )
    json.dumps([baselines, end_to_end], allow_nan=False)


def test_a_region_names_baselines_and_candidates() -> None:
    baselines = (
        {"label": "eager+graph", "decision": "runs", "reason": "2.0 us, the fastest baseline"},
    )
    attempts = (
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
        raced=baselines,
        tried=attempts,
    )
    region_event, call_event = describe_explanation(
        Explanation(target="Net", device="cuda", regions=(region,), gate=("end to end 1.1x",))
    )
    assert region_event["runs"] == "eager+graph"
    assert [contender["label"] for contender in region_event["contenders"]] == [
        "eager+graph",
        "gemm -> eager",
    ]
    assert "techniques" not in region_event["contenders"][1]
    assert call_event == {"stage": "explain", "what": "whole call", "gate": ["end to end 1.1x"]}
