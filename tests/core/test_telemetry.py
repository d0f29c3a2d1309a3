"""Events are kept in order and counted; failures are logged once and raised only on request."""

from __future__ import annotations

import logging

import pytest

from torch_cudal1.core import telemetry


@pytest.fixture(autouse=True)
def fresh() -> None:
    telemetry.reset()


def test_an_event_is_kept_with_its_facts_and_counted() -> None:
    telemetry.record("swap", "runs", "abc", what="eager")
    report = telemetry.report()
    assert report.counters == {"swap.runs": 1}
    (event,) = report.events
    assert (event.stage, event.what, event.region, event.facts) == (
        "swap",
        "runs",
        "abc",
        {"what": "eager"},
    )


def test_old_events_go_and_their_counts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(telemetry._MAX_EVENTS + 1):
        telemetry.record("run", "call")
    report = telemetry.report()
    assert len(report.events) == telemetry._MAX_EVENTS
    assert report.counters["run.call"] == telemetry._MAX_EVENTS + 1


def test_a_kind_of_failure_is_logged_once_and_counted_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "torch_cudal1"):
        for _ in range(2):
            telemetry.fallback("run", ValueError("x"), strictness="warn")
    assert len(caplog.records) == 1
    assert telemetry.report().counters["fallbacks"] == 2
    with pytest.raises(ValueError, match="x"):
        telemetry.fallback("run", ValueError("x"), strictness="error")
