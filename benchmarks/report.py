"""What a results file holds besides its rows: the environment and the summary; how it is written
and printed.

A file is replaced in one step, so that a run that is killed leaves a complete one. This module
measures nothing and records no host name, user or path.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import Row
from torch_cudal1.core.version import __version__

__all__ = [
    "SCHEMA",
    "SLOWER",
    "environment",
    "format_table",
    "load",
    "make_document",
    "rows_as_json",
    "save",
    "summarise",
]

SCHEMA = 1
SLOWER = 0.98  # a row below this against the better baseline counts as a regression
_ROOT = Path(__file__).resolve().parent.parent
_GPU_FACTS = ("driver_version", "utilization.gpu", "clocks.sm", "temperature.gpu", "power.draw")


def environment() -> dict[str, Any]:
    """The machine and the switches that change numbers, read before anything is measured."""
    cuda = torch.cuda.is_available()
    return {
        "package": __version__,
        "version": _run_command(
            ["git", "-C", str(_ROOT), "describe", "--always", "--tags", "--dirty"]
        ),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _read_triton_version(),
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "gpu": torch.cuda.get_device_name() if cuda else "",
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "gpu_state": _read_gpu_state() if cuda else {},
        "cpu": _read_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "flags": {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
    }


def make_document(
    kind: str, options: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], **more: Any
) -> dict[str, Any]:
    """A results file as a value: environment first."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    # no path of a machine
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    command = shlex.join(["python", "-m", _find_program(kind), *words])
    head = {"schema": SCHEMA, "kind": kind, "created": created, "command": command}
    return {**head, **more, "options": dict(options), "rows": list(rows)}


def _find_program(kind: str) -> str:
    """The module that was started, by default the benchmark of that kind."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    return name if name.startswith("benchmarks.") else f"benchmarks.bench_{kind}"


def save(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON beside `path` and rename it over: readers see the old file or the new one. Raises
    ValueError on NaN or Inf.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def load(path: Path) -> dict[str, Any]:
    """Read a results file. Raises ValueError for another schema."""
    value: dict[str, Any] = json.loads(path.read_text())
    if value.get("schema") != SCHEMA:
        raise ValueError(
            f"{path.name} has schema {value.get('schema')!r}; expected {SCHEMA}: measure again"
        )
    return value


def summarise(rows: Sequence[Row], contender: str) -> dict[str, Any]:
    """How one contender did against the better of eager and torch.compile over all cases: counts,
    geometric means, regressions.
    """
    contender_rows = [row for row in rows if row.contender == contender]
    ratios_by_case = {
        f"{row.model}/{row.phase}": ratio
        for row in contender_rows
        if row.status == "ok" and (ratio := _better_ratio(row))
    }
    ratios = [ratio["speedup"] for ratio in ratios_by_case.values()]
    return {
        "contender": contender,
        "cases": len(contender_rows),
        "measured": len(ratios),
        "failed": sorted(
            f"{row.model}/{row.phase}" for row in contender_rows if row.status == "failed"
        ),
        "wrong": sorted(
            f"{row.model}/{row.phase}" for row in contender_rows if row.status == "wrong"
        ),
        "geomean": _geomean(ratios),
        "geomean_clamped": _geomean([max(1.0, ratio) for ratio in ratios]),
        "slower": sorted(
            case for case, ratio in ratios_by_case.items() if ratio["speedup"] < SLOWER
        ),
        "slower_beyond_noise": sorted(
            case for case, ratio in ratios_by_case.items() if ratio["high"] < SLOWER
        ),
        "unsteady": sorted(case for case, ratio in ratios_by_case.items() if not ratio["steady"]),
        "fell_back": sorted(f"{row.model}/{row.phase}" for row in contender_rows if row.fallbacks),
        "won": sorted(case for case, ratio in ratios_by_case.items() if ratio["low"] >= 1.05),
    }


def format_table(rows: Sequence[Row]) -> str:
    """The rows for a terminal: times in microseconds, speed-ups with their intervals."""
    lines = [
        f"{'case':24} {'contender':22} {'us':>10}  {'vs eager':22} {'vs compile':22} {'error':>7}  note"
    ]
    for row in rows:
        us = "-" if row.median_us is None else f"{row.median_us:.1f}"
        error = "-" if row.error_ratio is None else f"{row.error_ratio:.2f}x"
        note = "" if row.status == "ok" else f"{row.status}: {row.reason[:80]}"
        note += "".join(f" not served: {reason[:80]}" for reason in row.fallbacks[:1])
        case = f"{row.model}/{row.phase}"
        lines.append(
            f"{case:24} {row.contender:22} {us:>10}  {_format_ratio(row.vs_eager):22} {_format_ratio(row.vs_compile):22} {error:>7}  {note}"
        )
    return "\n".join(line.rstrip() for line in lines)


def rows_as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain values."""
    return [asdict(row) for row in rows]


def _better_ratio(row: Row) -> Mapping[str, float] | None:
    """The smaller of the two speed-ups is the one over the faster baseline."""
    ratios = [ratio for ratio in (row.vs_eager, row.vs_compile) if ratio is not None]
    return min(ratios, key=lambda ratio: ratio["speedup"], default=None)


def _format_ratio(ratio: Mapping[str, float] | None) -> str:
    return (
        "-"
        if ratio is None
        else f"{ratio['speedup']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
    )


def _geomean(ratios: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def _read_triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def _read_gpu_state() -> dict[str, str]:
    answer = _run_command(
        ["nvidia-smi", f"--query-gpu={','.join(_GPU_FACTS)}", "--format=csv,noheader"]
    ).split("\n")[0]
    return dict(zip(_GPU_FACTS, (part.strip() for part in answer.split(",")), strict=False))


def _read_cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next(
        (
            line.split(":", 1)[1].strip()
            for line in text.splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )


def _run_command(command: list[str]) -> str:
    """The output of a command; "" when it is absent or fails."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""
