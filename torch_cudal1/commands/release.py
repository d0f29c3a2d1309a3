"""`cudal1 judge --release FILE`: every line of a CUDA-L1 release file, each against its own reference.

A line is one JSON object: level_id, task_id, ref_code, custom_code, and scores, which are kept and not believed. A null code, or
the string "None", was withdrawn by its authors: it is counted, never dropped. With --json OUT each result is a line of that file,
written as soon as it is known; a line that is there already for the same sources and the same job is not judged again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.commands import device
from torch_cudal1.commands.verdicts import document, job_for, sha256, unusable, withdrawn
from torch_cudal1.errors import SettingError
from torch_cudal1.explanation import plain
from torch_cudal1.judge.court_pair import PairCourt, PairJob
from torch_cudal1.judge.subject import ReferenceFailure
from torch_cudal1.settings import Settings
from torch_cudal1.view import text
from torch_cudal1.view.judgement import told
from torch_cudal1.view.terminal import Screen

__all__ = ["Line", "read_release", "run", "summary"]


@dataclass(frozen=True)
class Line:
    """One line of a release file. `candidate` None: withdrawn. `scores`: what the file claims."""

    number: int
    level: int | None
    task: str
    reference: str
    candidate: str | None
    scores: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For people."""
        return f"level {self.level} task {self.task}"


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Judge what is left to judge, then show all of it. Exit code 0 when every line has its result, whatever that is."""
    lines = read_release(args.release)
    chosen = [line for line in lines if args.level is None or line.level == args.level][: args.limit]
    job = job_for(args, settings, torch.device(device.choose(args.device)), trust="foreign")
    out = args.json if isinstance(args.json, Path) else None
    known = _finished(out, job) if out else {}
    results: list[dict[str, Any]] = []

    def step(what: str, fraction: float | None) -> None:
        progress(f"{chosen[len(results)].name}: {what}", len(results) / len(chosen))

    with screen.progress() as progress, PairCourt(job, step, ahead=True) as court:
        for line in chosen:
            found = known.get(_identity(line))
            if found is None:
                found = {**_judged(court, line), "line": line.number, "level_id": line.level, "task_id": line.task}
                found["published"] = dict(line.scores)
                _append(out, found)
                screen.line(text.brief(f"{line.name}: {told(found)}"))
            results.append(found)
    rows = summary(results)
    screen.table(("outcome", "lines", "share", "speed-up, geometric mean and median"), rows)
    screen.json(results)
    return 0


def read_release(path: Path) -> list[Line]:
    """The lines of a file, in order; empty ones are passed over. Raises OSError, or SettingError for a line that is no task."""
    lines = []
    for number, content in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if content.strip():
            lines.append(_line(path, number, content))
    return lines


def summary(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of the table: each outcome, refusals by detector too; the shares are of all lines."""
    counts = Counter(_row_name(found) for found in results)
    order = ("accepted", "not faster", "refused", "withdrawn", "reference unusable")
    names = sorted(counts, key=lambda name: (next(i for i, start in enumerate(order) if name.startswith(start)), -counts[name]))
    rows = [
        [name, str(counts[name]), f"{counts[name] / len(results):.1%}", _speeds(f for f in results if _row_name(f) == name)]
        for name in names
    ]
    return [*rows, ["all", str(len(results)), "100.0%" if results else text.ABSENT, text.ABSENT]]


def _row_name(found: Mapping[str, Any]) -> str:
    name = str(found["outcome"]).replace("_", " ")
    return f"{name} by {found['detector']}" if name == "refused" else name


def _speeds(results: Iterable[Mapping[str, Any]]) -> str:
    speeds = [float(found["timing"]["speedup"]) for found in results if found["timing"]]
    if not speeds:
        return text.ABSENT
    return f"{text.speedup(math.exp(statistics.fmean(map(math.log, speeds))))}, {text.speedup(statistics.median(speeds))}"


def _judged(court: PairCourt, line: Line) -> dict[str, Any]:
    if line.candidate is None:
        return withdrawn(court.job, reference=line.reference)
    try:
        return document(court.judge(line.reference, line.candidate), court.job, reference=line.reference)
    except ReferenceFailure as error:
        return unusable(error, court.job, reference=line.reference, candidate=line.candidate)


def _line(path: Path, number: int, content: str) -> Line:
    expected = "a JSON object with level_id, task_id, ref_code and custom_code"
    try:
        found = json.loads(content)
        code = found["custom_code"]
        reference, level, task = found["ref_code"], found.get("level_id"), found["task_id"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            f"{path} line {number}", text.brief(content, 80), f"{expected} ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(reference, str) or not (code is None or isinstance(code, str)):
        raise SettingError(f"{path} line {number}", text.brief(content, 80), f"{expected}; the codes as strings")
    scores = {name: value for name, value in found.items() if name.startswith("score")}
    gone = code is None or code.strip() in ("", "None")
    return Line(number, int(level) if str(level).isdigit() else None, str(task), reference, None if gone else code, scores)


def _identity(line: Line) -> tuple[int, str, str]:
    return line.number, sha256(line.reference), sha256(line.candidate or "")


def _finished(out: Path, job: PairJob) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Results of an earlier run under the same job. What cannot be read, such as a line cut off by a kill, is judged again."""
    found = {}
    for entry in _entries(out):
        same = (entry["profile"], entry["device"], entry["gradients"], entry["contract"]) == (
            *(job.profile, str(job.device), job.gradients),
            plain(job.contract),
        )
        if same:
            found[int(entry["line"]), entry["sha256"]["reference"], entry["sha256"]["candidate"]] = entry
    return found


def _entries(out: Path) -> Iterator[dict[str, Any]]:
    if not out.exists():
        return
    for content in out.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(content)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"profile", "device", "gradients", "contract", "line", "sha256"} <= set(entry):
            yield entry


def _append(out: Path | None, found: Mapping[str, Any]) -> None:
    if out is None:
        return
    whole = not out.exists() or out.read_bytes().endswith(b"\n") or not out.stat().st_size
    with out.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(plain(found), allow_nan=False) + "\n")
