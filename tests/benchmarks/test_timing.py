"""Samples of several runs are taken in common rounds, and a speed-up has an interval."""

from __future__ import annotations

import pytest

from benchmarks import timing
from benchmarks.timing import MIN_ROUNDS, Samples, collect_samples


def test_a_speed_up_is_the_baselines_time_over_the_contenders() -> None:
    samples = Samples({"eager": (10.0,) * 14, "kernel": (5.0,) * 14})
    assert samples.median_us("kernel") == 5.0
    assert samples.speedup("eager", "kernel") == {
        "speedup": 2.0,
        "low": 2.0,
        "high": 2.0,
        "steady": 1,
    }


def test_every_run_is_sampled_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleave(
        runs: dict[str, object], device: object, budget_s: float
    ) -> dict[str, list[float]]:
        return {name: [10.0] * 5 for name in runs}

    monkeypatch.setattr(timing, "interleave", interleave)
    runs = {"eager": lambda: None, "kernel": lambda: None}
    samples = collect_samples(runs, device="cpu", rounds=1)
    assert {len(values) for values in samples.us.values()} == {15}
    assert len(samples.us["eager"]) >= MIN_ROUNDS
    assert {
        len(values) for values in collect_samples(runs, device="cpu", rounds=20).us.values()
    } == {20}


def test_more_time_is_spent_only_while_an_interval_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    def interleave(
        runs: dict[str, object], device: object, budget_s: float
    ) -> dict[str, list[float]]:
        rounds.append(1)
        if len(rounds) < 3:
            return {"eager": [10.0] * 14, "kernel": [5.0, 9.0] * 7}
        return {"eager": [10.0] * 7_000, "kernel": [5.0] * 7_000}

    monkeypatch.setattr(timing, "interleave", interleave)
    runs = {"eager": lambda: None, "kernel": lambda: None}
    collect_samples(runs, device="cpu", rounds=14)
    assert len(rounds) == 1
    rounds.clear()
    collect_samples(runs, device="cpu", rounds=14, more_s=60.0)
    assert len(rounds) == 3


def test_nothing_to_time_is_no_samples() -> None:
    assert collect_samples({}, device="cpu", rounds=14).us == {}
