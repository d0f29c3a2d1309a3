"""`cudal1 judge --release FILE`: every line of a CUDA-L1 release file, each against its own
reference.

A line is one JSON object: level_id, task_id, ref_code, custom_code, and scores, which are kept and
not believed. A null code, or the string "None", was withdrawn by its authors: it is counted, never
dropped. With --json OUT each result is a line of that file, written as soon as it is known; a line
that is there already for the same sources and the same job is not evaluated again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.cli.commands import device, results
from torch_cudal1.cli.commands.verdicts import (
    evaluation_document,
    evaluation_job,
    sha256,
    unusable_document,
    withdrawn_document,
)
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.evaluation import describe_outcome
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.report import plain
from torch_cudal1.core.settings import Settings
from torch_cudal1.ingest.formats.cuda_l1 import ReleaseLine, UnreadableLine, read_lines
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator
from torch_cudal1.judge.reference.region_reference import ReferenceFailure

__all__ = ["read_release", "run", "summary"]

# What a line needs to be recognised as a result of the same sources under the same job.
_KEYS = frozenset({"profile", "device", "gradients", "contract", "line", "sha256"})


def run(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Evaluate the lines without a result, then show all of them. Exit code 0 when every line has its result,
    whatever that is.
    """
    lines = read_release(args.release)
    chosen = [line for line in lines if args.level is None or line.level == args.level][
        : args.limit
    ]
    # "foreign": both sources of a line were written by others, so the reference is confined too.
    job = evaluation_job(args, settings, torch.device(device.choose(args.device)), trust="foreign")
    out = args.json if isinstance(args.json, Path) else None
    # A release has hundreds of lines: a second run goes on where an interrupt ended the first.
    finished = _read_finished(out, job) if out else {}
    documents: list[dict[str, Any]] = []

    def step(activity: str, fraction: float | None) -> None:
        # Lines from an earlier run count as done at once.
        progress(f"{chosen[len(documents)].name}: {activity}", len(documents) / len(chosen))

    # `ahead`: the next candidate's process starts while this one is evaluated, never while it is
    # timed.
    with screen.progress() as progress, SourceEvaluator(job, step, ahead=True) as evaluator:
        for line in chosen:
            content = finished.get(_identify_line(line))
            if content is None:
                content = {
                    **_evaluate_line(evaluator, line),
                    "line": line.number,
                    "level_id": line.level,
                    "task_id": line.task,
                }
                # The authors' own scores stand beside the measured ones and enter no decision.
                content["published"] = dict(line.scores)
                # Written before it is shown, and before the next line may end this process.
                results.append(out, content)
                screen.line(text.brief(f"{line.name}: {describe_outcome(content)}"))
            documents.append(content)
    rows = summary(documents)
    screen.table(("outcome", "lines", "share", "speed-up, geometric mean and median"), rows)
    screen.json(documents)
    return 0


def read_release(path: Path) -> list[ReleaseLine]:
    """The lines of a file, in order; empty ones are passed over. Raises OSError, or SettingError
    for a line that is no task.
    """
    lines = []
    for line in read_lines(path):
        # A line that is passed over would change every share of the summary.
        if isinstance(line, UnreadableLine):
            raise SettingError(
                f"{path} line {line.number}", line.content, line.reason.removeprefix("expected ")
            )
        lines.append(line)
    return lines


def summary(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of the table: each outcome, refusals by detector too; the shares are of all lines."""
    counts = Counter(_name_row(content) for content in results)
    order = ("accepted", "not faster", "refused", "withdrawn", "reference unusable")
    names = sorted(
        counts,
        key=lambda name: (
            next(i for i, start in enumerate(order) if name.startswith(start)),
            -counts[name],
        ),
    )
    rows = [
        [
            name,
            str(counts[name]),
            # Shares are of all lines, withdrawn and unusable ones included: nothing is dropped.
            f"{counts[name] / len(results):.1%}",
            _format_speeds(content for content in results if _name_row(content) == name),
        ]
        for name in names
    ]
    return [*rows, ["all", str(len(results)), "100.0%" if results else text.ABSENT, text.ABSENT]]


def _name_row(content: Mapping[str, Any]) -> str:
    name = str(content["outcome"]).replace("_", " ")
    return f"{name} by {content['detector']}" if name == "refused" else name


def _format_speeds(results: Iterable[Mapping[str, Any]]) -> str:
    speeds = [float(content["timing"]["speedup"]) for content in results if content["timing"]]
    if not speeds:
        return text.ABSENT
    # The geometric mean: of ratios, an arithmetic mean depends on which side is the denominator.
    return f"{text.speedup(math.exp(statistics.fmean(map(math.log, speeds))))}, {text.speedup(statistics.median(speeds))}"


def _evaluate_line(evaluator: SourceEvaluator, line: ReleaseLine) -> dict[str, Any]:
    if line.candidate is None:
        return withdrawn_document(evaluator.config, reference=line.reference)
    try:
        return evaluation_document(
            evaluator.evaluate(line.reference, line.candidate),
            evaluator.config,
            reference=line.reference,
        )
    except ReferenceFailure as error:
        return unusable_document(
            error, evaluator.config, reference=line.reference, candidate=line.candidate
        )


def _identify_line(line: ReleaseLine) -> tuple[int, str, str]:
    return line.number, sha256(line.reference), sha256(line.candidate or "")


def _read_finished(
    out: Path, job: SourceEvaluationConfig
) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Results of an earlier run under the same job. What cannot be read, such as a line cut off by
    a kill, is evaluated again.
    """
    documents = {}
    for entry in results.read(out, _KEYS):
        # Another profile, device or contract may end otherwise, so only results of the same job
        # count.
        same = (entry["profile"], entry["device"], entry["gradients"], entry["contract"]) == (
            *(job.profile, str(job.device), job.gradients),
            plain(job.contract),
        )
        if same:
            documents[
                int(entry["line"]), entry["sha256"]["reference"], entry["sha256"]["candidate"]
            ] = entry
    return documents
