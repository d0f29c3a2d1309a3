"""Timings survive whoever is killed while writing, and whatever else gets into their file; it stays
small.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Contract, Target
from torch_cudal1.search.cost_model import timings
from torch_cudal1.search.cost_model.timings import (
    KernelTiming,
    append_timings,
    parse_timings,
    read_timings,
    timings_path,
)
from torch_cudal1.store.cache.files import Stored

ONE = KernelTiming("gemm", {"m": 4, "n": 8}, {"method": "half", "rows": 16, "loop": True}, 2.0, 3.5)
TARGET = Target("cuda", "sm_90", "some GPU", "580", "2.11", "3.6")
SPOILED = (
    b"",
    b"no JSON",
    b"[1, 2]",
    b'{"family":"gemm"}',
    b'{"family":"gemm","sizes":{"m":4},"config":{"rows":16},"bound_us":1.0,"us":NaN}',
    b'{"family":"gemm","sizes":{"m":4},"config":{"rows":16},"bound_us":1.0,"us":-1.0}',
    b'{"family":"gemm","sizes":{"m":4},"config":{"rows":16},"bound_us":0,"us":1.0}',
    b'{"family":"gemm","sizes":{"m":"4"},"config":{"rows":16},"bound_us":1.0,"us":1.0}',
    b'{"family":"gemm","sizes":{"m":4},"config":{"rows":[16]},"bound_us":1.0,"us":1.0}',
    b'{"family":7,"sizes":{"m":4},"config":{"rows":16},"bound_us":1.0,"us":1.0}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
)


def test_what_was_added_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "timings" / "one.jsonl"
    more = [replace(ONE, us=float(us)) for us in range(1, 5)]
    assert read_timings(path) == []
    assert isinstance(append_timings(path, more[:2]), Stored)
    assert isinstance(append_timings(path, more[2:]), Stored)
    assert read_timings(path) == more
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("line", SPOILED, ids=range(len(SPOILED)))
def test_a_spoiled_line_costs_itself_only(line: bytes) -> None:
    encoded = timings._encode_line(ONE)
    assert parse_timings(encoded + b"\n" + line + b"\n" + encoded) == [ONE, ONE]


def test_a_writer_that_was_killed_in_the_middle_spoils_its_own_line_only(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    append_timings(path, [ONE])
    path.write_bytes(path.read_bytes() + timings._encode_line(ONE)[:30])  # no line end
    append_timings(path, [replace(ONE, us=7.0)])
    assert [timing.us for timing in read_timings(path)] == [3.5, 7.0]


def test_many_writers_of_which_some_are_killed_leave_a_file_of_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    code = f"""
from pathlib import Path
from torch_cudal1.search.cost_model.timings import KernelTiming, append_timings
while True:
    append_timings(Path({str(path)!r}), [KernelTiming("gemm", {{"m": 4}}, {{"rows": 16}}, 2.0, 3.5)] * 5)
"""
    writers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    end = time.monotonic() + 60
    while time.monotonic() < end and len(read_timings(path)) < 50:
        time.sleep(0.02)
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    append_timings(path, [ONE])
    lines = [line for line in path.read_bytes().splitlines() if line]
    assert len(read_timings(path)) >= 51
    assert len(lines) - len(read_timings(path)) <= len(writers)
    assert read_timings(path)[-1] == ONE


def test_a_file_beyond_its_limit_keeps_its_newer_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "_MAX_FILE_BYTES", 4000)
    path = tmp_path / "one.jsonl"
    for us in range(1, 200):
        assert isinstance(append_timings(path, [replace(ONE, us=float(us))]), Stored)
        assert path.stat().st_size <= 4000
    latencies = [timing.us for timing in read_timings(path)]
    assert latencies == sorted(latencies)
    assert latencies[-1] == 199.0
    assert len(latencies) > 8


def test_a_disk_that_refuses_costs_the_timing_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert isinstance(append_timings(tmp_path / "file" / "one.jsonl", [ONE]), Refusal)
    assert read_timings(tmp_path / "file" / "one.jsonl") == []


def test_other_machines_and_other_contracts_have_other_files() -> None:
    names = [
        timings_path(Path("c"), target, contract)
        for target in (TARGET, replace(TARGET, sku="another"))
        for contract in (Contract(), Contract("strict"))
    ]
    assert len(set(names)) == 4
    assert timings_path(Path("c"), replace(TARGET, driver="590"), Contract()) == names[0]
