"""The lists of publishers and revocations: read whole or refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.store.trust.lists import (
    Publishers,
    Revocations,
    append_revocation,
    read_publishers,
    read_revocations,
)

KEY = "ed25519:" + "ab" * 32


def test_no_list_is_an_empty_one_and_an_absent_one_is_refused(tmp_path: Path) -> None:
    assert read_publishers(None) == Publishers()
    assert read_revocations(None) == Revocations()
    absent = read_publishers(tmp_path / "publishers.toml")
    assert isinstance(absent, Refusal)
    assert "restore it, or take it out of the settings" in absent.reason


def test_a_revocation_that_was_appended_reads_back(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "revoked.toml"
    append_revocation(path, "entry", "ab" * 32, 'wrong for "NaN"')
    append_revocation(path, "key", KEY, "lost")
    assert read_revocations(path) == Revocations({"ab" * 32: 'wrong for "NaN"'}, {}, {KEY: "lost"})


def test_a_record_that_would_break_the_list_is_not_appended(tmp_path: Path) -> None:
    path = tmp_path / "revoked.toml"
    append_revocation(path, "entry", "ab" * 32, "why")
    before = path.read_bytes()
    with pytest.raises(SettingError, match="left as it is"):
        append_revocation(path, "entry", "no digest", "why")
    assert path.read_bytes() == before
