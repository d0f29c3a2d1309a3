"""A measured process records the programs that it starts, and has no network when it is offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RECORD_STARTED = """
import socket, subprocess, sys
from benchmarks.start_child import record_started_programs
started = []
record_started_programs(started, offline=sys.argv[1] == "offline")
try:
    socket.create_connection(("127.0.0.1", 9), timeout=0.1)
except ConnectionError as error:
    print("no network" if "no network" in str(error) else "refused")
subprocess.run([sys.executable, "-c", ""])
print(len(started))
"""


@pytest.mark.parametrize(("mode", "answer"), [("offline", "no network"), ("as it is", "refused")])
def test_an_offline_process_has_no_network_and_records_what_it_starts(
    mode: str, answer: str
) -> None:
    root = Path(__file__).parents[2]
    completed = subprocess.run(
        [sys.executable, "-c", RECORD_STARTED, mode],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.stdout.split("\n")[:2] == [answer, "1"], completed.stderr[-2000:]
