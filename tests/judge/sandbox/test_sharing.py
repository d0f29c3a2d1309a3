"""A judge that knows of no other process on the device gives way to none, and waits as told."""

from __future__ import annotations

import time

import pytest

from torch_cudal1.judge.sandbox.sharing import DeviceSharing


def test_the_default_rests_for_the_seconds_it_is_given_and_gives_way_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    sharing = DeviceSharing()
    sharing.give_way()
    assert sleeps == []
    sharing.pause_for(0.25)
    assert sleeps == [0.25]
