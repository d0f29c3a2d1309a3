"""Keeps a process that measures matrix products alive: one that hangs or dies is a row with that
reason, and a fresh one goes on with the next candidate.

The journal in the folder has one JSON object a row, written by both sides. The measuring process
prints `start CASE / CANDIDATE` before each step, so that its supervisor knows what it did last.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["append_journal", "read_journal", "supervise"]

_START_UP_S = 90.0  # until a process has imported torch and opened the device
_SILENT_S = 40.0  # a candidate that says nothing for so long hangs
_MAX_LOST = 8  # processes that died or hung: the machine is at fault, not a candidate


def read_journal(folder: Path) -> list[dict[str, Any]]:
    path = folder / "journal"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_journal(folder: Path, row: Mapping[str, Any]) -> None:
    text = json.dumps({k: _to_json_value(v) for k, v in row.items()})
    with (folder / "journal").open("a") as file:
        file.write(text + "\n")


def _to_json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not -1e308 < value < 1e308 else value


def supervise(folder: Path, budget_s: float) -> None:
    """Run measuring processes until one ends by itself, the time is up, or too many were lost."""
    end, lost = time.monotonic() + budget_s, 0
    while lost < _MAX_LOST and time.monotonic() < end:
        last, reason = _supervise_process(folder, end)
        if not reason:
            return
        lost += 1
        method = last.split(" / ")[-1].split(" ")[0]
        print(f"lost: {last}: {reason}", flush=True)
        append_journal(
            folder, {"case": last.split(" / ")[0], "name": last, "method": method, "failed": reason}
        )


def _supervise_process(folder: Path, end: float) -> tuple[str, str]:
    """The last step that a process announced, and why it is gone ("" when it ended well)."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_gemm",
        "--serve",
        str(folder),
        "--budget-s",
        str(max(1.0, end - time.monotonic())),
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump_lines, args=(child, lines), daemon=True).start()
    last, tail = "start-up", [""]
    while True:
        try:
            line = lines.get(timeout=_SILENT_S if last != "start-up" else _START_UP_S)
        except queue.Empty:
            child.kill()
            child.wait()
            return last, "hangs"
        if line is None:
            break
        if line.startswith("start "):
            last = line[6:].strip()
        else:
            tail = [*tail[-8:], line.strip()]
    code = child.wait()
    return last, "" if code == 0 else f"exit status {code}: {' / '.join(tail)[-600:]}"


def _pump_lines(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)
