"""The detection matrix takes no more of the machine than its jobs' share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversarial.matrix import fair_share, limit_threads
from torch_cudal1.judge.sandbox.filesystem_policy import make_environment


@pytest.mark.parametrize(
    ("cores", "jobs", "share"), [(32, 6, 5), (2, 2, 1), (4, 24, 1), (16, 1, 16)]
)
def test_jobs_share_the_cores(cores: int, jobs: int, share: int) -> None:
    assert fair_share(cores, jobs) == share


@pytest.mark.parametrize(("asked", "given"), [(None, "5"), ("2", "2")])
def test_a_judged_process_gets_its_share_unless_the_user_gave_another(
    asked: str | None, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked or "")
    if asked is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads(5)
    for own in (True, False):
        assert make_environment(tmp_path, own=own, visible_gpu=False)["OMP_NUM_THREADS"] == given
