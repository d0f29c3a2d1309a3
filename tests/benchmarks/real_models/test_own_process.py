"""A measurement in a process of its own: what it prints last counts, and failures have a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.real_models.own_process import run_measurement


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "measured_module.py").write_text(
        "import json, os, sys, time\n"
        "if sys.argv[1] == 'fail': sys.exit('no such model')\n"
        "if sys.argv[1] == 'sleep': time.sleep(60)\n"
        "if sys.argv[1] == 'silent': sys.exit()\n"
        "print('not this line')\n"
        "print(json.dumps({'cache': os.environ['TORCH_CUDAL1_CACHE_DIR'], 'given': sys.argv[1:]}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "measured_module"


def test_the_last_line_counts_and_caches_are_its_own(module: str, tmp_path: Path) -> None:
    facts = run_measurement(module, ["a", "b"], tmp_path / "caches", 60.0)
    assert facts == {"cache": str(tmp_path / "caches" / "entries"), "given": ["a", "b"]}


@pytest.mark.parametrize(
    ("argument", "reason"), [("fail", "no such model"), ("silent", "without a word")]
)
def test_a_process_that_fails_says_why(
    module: str, tmp_path: Path, argument: str, reason: str
) -> None:
    assert run_measurement(module, [argument], tmp_path, 60.0) == {"failed": reason}


def test_a_process_that_takes_too_long_is_ended(module: str, tmp_path: Path) -> None:
    assert run_measurement(module, ["sleep"], tmp_path, 2.0) == {"failed": "not ready in 2 s"}
