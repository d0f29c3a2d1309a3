"""What is quarantined stays so for every later process, also where its record is damaged."""

from __future__ import annotations

from pathlib import Path

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.cache.files import Stored
from torch_cudal1.store.cache.quarantine import (
    QuarantineRecord,
    find_quarantine_reason,
    lift_quarantine,
    list_quarantined,
    quarantine_candidate,
)

KEY, CANDIDATE = "ab" * 32, "cd" * 32
RECORD = QuarantineRecord(
    KEY, CANDIDATE, "wrong for NaN", "2026-01-01T00:00:00+00:00", "NVIDIA H200"
)


def test_a_candidate_is_refused_by_the_first_folder_that_has_a_record(tmp_path: Path) -> None:
    assert find_quarantine_reason([tmp_path], KEY, CANDIDATE) is None
    assert isinstance(quarantine_candidate(tmp_path / "b", RECORD), Stored)
    reason = find_quarantine_reason([tmp_path / "a", tmp_path / "b"], KEY, CANDIDATE)
    assert reason == Refusal("quarantined: wrong for NaN")
    assert find_quarantine_reason([tmp_path / "b"], KEY, "ef" * 32) is None


def test_a_damaged_record_still_holds_its_candidate_back(tmp_path: Path) -> None:
    stored = quarantine_candidate(tmp_path, RECORD)
    assert isinstance(stored, Stored)
    stored.path.write_bytes(b"{")
    reason = find_quarantine_reason([tmp_path], KEY, CANDIDATE)
    assert reason is not None
    assert "is unreadable" in reason.reason


def test_lifting_deletes_what_matches_only(tmp_path: Path) -> None:
    other = QuarantineRecord("ef" * 32, CANDIDATE, "slow")
    quarantine_candidate(tmp_path, RECORD)
    quarantine_candidate(tmp_path, other)
    assert set(list_quarantined([tmp_path])) == {RECORD, other}
    (deleted,) = lift_quarantine(tmp_path, lambda record: record.region_key == KEY)
    assert not deleted.exists()
    assert list_quarantined([tmp_path]) == (other,)
