"""The process of a column as its runner sees it: started, asked for samples, and ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ColumnRun", "await_preparation", "describe", "end", "sample", "start_column"]

_ROOT = Path(__file__).resolve().parents[2]
# Seconds that one column is sampled in a round.
SAMPLE_S = 0.15
# A sample of a column that hangs ends it.
ANSWER_LIMIT_S = 60.0


@dataclass
class ColumnRun:
    """One column of one model: its process, what it answered, and its samples by round."""

    model: str
    column: str
    process: subprocess.Popen[str]
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """Whether it can be sampled."""
        return bool(self.facts) and "failed" not in self.facts


def start_column(
    model: str, column: str, args: argparse.Namespace, folder: Path, gpu: int | None = None
) -> ColumnRun:
    """Start the process of a column, whose caches lie in `folder`; `gpu`: the only one that it sees."""
    folder.mkdir(parents=True, exist_ok=True)
    # Caches of its own: a column must not find what another one compiled.
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": str(args.compile_threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    command = [sys.executable, "-m", "benchmarks.real_models.column_process"]
    for name in ("size", "precision", "device"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--model", model, "--column", column, "--cache-dir", str(folder / "cache")]
    log = folder / "log.txt"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
    return ColumnRun(model, column, process, log)


def await_preparation(runs: Sequence[ColumnRun], limit_s: float) -> None:
    """Wait until every column said how its preparation went; one that is late has failed."""
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for run in runs:
            selector.register(run.process.stdout, selectors.EVENT_READ, run)  # type: ignore[arg-type]
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                run: ColumnRun = key.data
                run.facts = _read_answer(run)
    for run in runs:
        run.facts = run.facts or {"failed": f"not ready in {limit_s:g} s"}


def _read_answer(run: ColumnRun) -> dict[str, Any]:
    assert run.process.stdout is not None
    line = run.process.stdout.readline()
    if line:
        return dict(json.loads(line))
    lines = run.log.read_text(errors="replace").strip().splitlines()
    return {"failed": f"ended: {lines[-1][:300] if lines else 'without a word'}"}


def sample(run: ColumnRun) -> None:
    """One round of its samples. A column that fails or hangs has no more."""
    if not run.is_ready:
        return
    answer = _ask(run, f"sample {SAMPLE_S}")
    if "us" in answer:
        run.rounds.append(answer["us"])
    else:
        run.facts = answer


def describe(run: ColumnRun, question: str) -> None:
    """Add what the process answers to "profile" or "floor" to the column's facts. Samples are taken
    before: a column that fails here keeps its time.
    """
    if run.is_ready:
        answer = _ask(run, question)
        run.facts |= {question: answer.get(question, answer)}


def _ask(run: ColumnRun, line: str) -> dict[str, Any]:
    assert run.process.stdin is not None
    assert run.process.stdout is not None
    run.process.stdin.write(f"{line}\n")
    run.process.stdin.flush()
    with selectors.DefaultSelector() as selector:
        selector.register(run.process.stdout, selectors.EVENT_READ)
        return _read_answer(run) if selector.select(ANSWER_LIMIT_S) else {"failed": "hangs"}


def end(run: ColumnRun) -> None:
    """End its process, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
