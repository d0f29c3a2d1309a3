"""A Hub that does not answer is asked again only after a while, and never past the budget."""

from __future__ import annotations

import time

import pytest

from torch_cudal1.store.hub.hub_client import HubFailure
from torch_cudal1.store.hub.hub_mirror import CircuitBreaker

NO_ANSWER = HubFailure("no answer in 2 s", "unreachable")


def test_a_breaker_opens_after_no_answer_and_closes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    breaker = CircuitBreaker()
    assert breaker.check() is None
    breaker.record_answer(NO_ANSWER, 2.0)
    failure = breaker.check()
    assert failure is not None
    assert failure.reason == "not asked again yet: no answer in 2 s"
    now[0] += 61.0
    assert breaker.check() is None


def test_a_refusal_is_an_answer_and_opens_nothing() -> None:
    breaker = CircuitBreaker()
    breaker.record_answer(HubFailure("sha256 differs", "refused"), 0.1)
    assert breaker.check() is None


def test_a_breaker_stays_open_where_it_is_disabled_or_its_budget_is_spent() -> None:
    disabled = CircuitBreaker("offline mode is on").check()
    assert disabled == HubFailure("offline mode is on", "unreachable")
    breaker = CircuitBreaker(budget_s=3.0)
    breaker.record_answer(b"", 2.0)
    assert breaker.check() is None
    breaker.record_answer(b"", 2.0)
    failure = breaker.check()
    assert failure is not None
    assert "has waited 4 s for the Hub" in failure.reason
