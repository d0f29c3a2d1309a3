"""How busy other processes are: read from the system's counters, told from a quarter on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torch_cudal1.core.machine_load import LoadSample, describe_other_load, sample_load

# Linux, proc(5): user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
STAT = "cpu  1000 100 200 5000 300 10 20 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"


def test_the_counters_of_all_processors_are_read(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(STAT)
    sample = sample_load(tmp_path / "stat")
    assert sample is not None
    assert sample.total_s / sample.busy_s == pytest.approx(6630 / 1330)


@pytest.mark.parametrize("text", ["", "intr 1 2 3\n", "cpu  1 2 three 4 5 6 7\n"])
def test_a_system_that_offers_no_counters_gives_no_sample(tmp_path: Path, text: str) -> None:
    (tmp_path / "stat").write_text(text)
    assert sample_load(tmp_path / "stat") is None
    assert sample_load(tmp_path / "missing") is None
    assert describe_other_load(None, LoadSample(1.0, 1.0, 2.0)) == ""


@pytest.mark.parametrize(
    ("busy_s", "command_s", "sentence"),
    [(10.0, 9.0, ""), (20.0, 16.0, ""), (20.0, 10.0, "Other processes used 50% of")],
)
def test_what_others_use_is_told_and_what_the_command_itself_uses_is_not(
    busy_s: float, command_s: float, sentence: str
) -> None:
    before, after = (
        LoadSample(100.0, 5.0, 400.0),
        LoadSample(100.0 + busy_s, 5.0 + command_s, 420.0),
    )
    assert describe_other_load(before, after).startswith(sentence)
    assert bool(describe_other_load(before, after)) == bool(sentence)


def test_children_that_have_ended_count_as_own() -> None:
    before = sample_load()
    if before is None:
        pytest.skip("this system has no /proc/stat")
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    after = sample_load()
    assert after is not None
    assert after.command_s - before.command_s >= 0.3
