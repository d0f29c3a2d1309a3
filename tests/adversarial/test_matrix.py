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


@pytest.mark.parametrize(("user_setting", "expected"), [(None, "5"), ("2", "2")])
def test_a_child_gets_its_share_of_threads_unless_the_user_set_another(
    user_setting: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", user_setting or "")
    if user_setting is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads(5)
    for trusted in (True, False):
        assert (
            make_environment(tmp_path, own=trusted, visible_gpu=False)["OMP_NUM_THREADS"]
            == expected
        )
