"""Stands in for a task's process: speaks its line, and does what the task's source says. Imports no
torch, so it starts at once.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.kernelbench.processes import die_with_parent
from benchmarks.kernelbench.task_channel import TaskChannel


def main() -> None:
    """Run the source with `line`, `spec`, `folder` and `note` at hand."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--line", type=int)
    parser.add_argument("--spec", type=Path)
    args = parser.parse_args()
    die_with_parent()
    spec = json.loads(args.spec.read_text())
    folder = Path(spec["cache"]).parent

    def note(text: str) -> None:
        with (folder / "notes").open("a") as file:
            file.write(f"{time.monotonic()} {text}\n")

    def row(**columns: str) -> dict[str, object]:
        column_values = {
            name.replace("_", "."): {"status": status, "reason": ""}
            for name, status in columns.items()
        }
        return {
            "columns": column_values,
            "best": "eager",
            "against": {},
            "ours": {},
            "arms": {},
            "stages_s": {},
        }

    names = {
        "line": TaskChannel(Connection(args.line)),
        "spec": spec,
        "folder": folder,
        "note": note,
        "row": row,
        "os": os,
        "time": time,
    }
    exec(args.spec.with_suffix(".py").read_text(), names)


if __name__ == "__main__":
    main()
