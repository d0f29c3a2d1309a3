"""`cudal1 import-kernels PATH` and `export-kernels TARGET`: published kernels, and the cache's
kernels in a published format.

Importing judges, lowers and stores; the sources are read here and run in the judge's processes.
With --json OUT each result is a line of that file, written as soon as it is known, and a task that
is there already for the same sources, rules and cache is not done again. Exporting traces the
user's own TARGET, as `explain` does, and runs no kernel.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.api import targets
from torch_cudal1.cli.commands import device, results
from torch_cudal1.cli.commands.verdicts import EXIT_CODES, sha256
from torch_cudal1.cli.view import text
from torch_cudal1.cli.view.terminal import ProgressCallback, Screen
from torch_cudal1.core.errors import NotLowerableError, SandboxError, SettingError, TargetError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.report import plain
from torch_cudal1.core.settings import Settings
from torch_cudal1.core.version import __version__
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ingest.formats.flashinfer_export import ExportedEntry, export_entry
from torch_cudal1.ingest.formats.registry import read_tasks
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask
from torch_cudal1.ingest.published.adopt import Adoption, AdoptionOutcome
from torch_cudal1.ir.records import Region
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig
from torch_cudal1.store.cache.resolve import resolve
from torch_cudal1.store.context import TuneContext, make_context

__all__ = ["export_kernels", "import_kernels"]

# Raised when a key of a result changes its meaning: scripts of users read these lines.
SCHEMA = 1
_FOUND_WRONG = 1
# What a line needs to be recognised as the result of a task.
_KEYS = frozenset({"where", "sha256", "terms", "outcome", "reason"})
# These outcomes say something of this machine at that time, so a second run tries them again.
_AGAIN = ("not_judged", "failed")
_UNWELL = ("reference_unusable", "unreadable", *_AGAIN)
_ORDER = ("accepted", "not_faster", "rejected", "not_lowerable", "withdrawn", *_UNWELL)
# The codes of `cudal1 judge`, so that a script can treat both alike.
_CODES: Mapping[str, int] = {
    **EXIT_CODES,
    "rejected": 3,
    "not_lowerable": 3,
    "withdrawn": 3,
    "unreadable": 2,
    "not_judged": 1,
    "failed": 1,
}


def import_kernels(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Validate, lower and store every task. Exit code for one task as `judge`'s; for several 0, or 1 if
    something could not be read.
    """
    # All paths are looked at before the first task, which may take minutes.
    absent = [path for path in args.path if not path.exists()]
    if absent:
        raise SettingError(
            "PATH",
            str(absent[0]),
            "a release file, a Python file with ModelNew, or a folder of kernels",
        )
    if args.reference is not None and not args.reference.exists():
        raise SettingError(
            "--reference", str(args.reference), "a KernelBench-style file or a folder of those"
        )
    place = make_context(torch.device(device.choose(args.device)), settings)
    job = SourceEvaluationConfig(
        # `drop_in=False`: the stored Program runs for inference, on inputs of the examples' form
        # and under a guard, so only that is checked. "foreign": both sources were written by other
        # people.
        settings,
        place.contract,
        place.device,
        gradients=False,
        trust="foreign",
        drop_in=False,
    )
    tasks = list(
        _select_tasks(
            (task for path in args.path for task in read_tasks(path, args.reference)), args
        )
    )
    out = args.json if isinstance(args.json, Path) else None
    outcomes = _import_all(tasks, place, job, out, screen)
    rows = [
        [
            _format_outcome(result["outcome"]),
            result["name"],
            text.speedup(result["low"]),
            text.brief(result["reason"], 100),
        ]
        for result in outcomes
    ]
    if rows:
        screen.line("")
        screen.table(("outcome", "task", "at least", "reason"), rows)
    counts = Counter(result["outcome"] for result in outcomes)
    screen.line(
        ", ".join(f"{counts[name]} {_format_outcome(name)}" for name in _ORDER if counts[name])
        or "nothing to import"
    )
    screen.json(outcomes)
    # One task is a question with an answer, as for `judge`. Of many, some are always refused: that
    # is no failure of the import.
    if len(outcomes) == 1:
        return _CODES[outcomes[0]["outcome"]]
    return _FOUND_WRONG if not outcomes or any(counts[name] for name in _UNWELL) else 0


def export_kernels(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Write what the cache holds for every TARGET as FlashInfer-Trace files. Exit code 2 if a
    TARGET cannot be loaded.
    """
    regions: list[dict[str, Any]] = []
    failed: list[TargetError] = []
    with screen.progress() as progress:
        for region, place in _iter_regions(args, settings, progress, failed):
            export = _export_region(region, place)
            paths = _write_files(args.out, export) if isinstance(export, ExportedEntry) else []
            reason = export.reason if isinstance(export, Refusal) else ""
            regions.append(
                {"region": region.key, "name": region.name, "files": paths, "reason": reason}
            )
    rows = [
        [
            row["region"][:12],
            row["name"],
            ", ".join(row["files"]) or text.ABSENT,
            text.brief(row["reason"]),
        ]
        for row in regions
    ]
    if rows:
        screen.table(("region", "name", "written", "why not"), rows)
    screen.json({"exported": regions, "failed": [str(error) for error in failed]})
    for error in failed:
        screen.problem(str(error))
    return 2 if failed else 0


def _import_all(
    tasks: Sequence[PublishedTask | UnreadableTask],
    place: TuneContext,
    job: SourceEvaluationConfig,
    out: Path | None,
    screen: Screen,
) -> list[dict[str, Any]]:
    terms = _describe_terms(place)
    earlier = (
        [
            result
            for result in results.read(out, _KEYS)
            # Another machine, contract or cache may end otherwise: such a result does not count.
            if result["terms"] == terms and result["outcome"] not in _AGAIN
        ]
        if out
        else []
    )
    finished = {_identify_task(result): result for result in earlier}
    outcomes: list[dict[str, Any]] = []

    def step(activity: str, fraction: float | None) -> None:
        progress(f"{_name(tasks[len(outcomes)])}: {activity}", len(outcomes) / len(tasks))

    with screen.progress() as progress, Adoption(place, job, step) as adoption:
        for task in tasks:
            head = {
                "schema": SCHEMA,
                "package": __version__,
                "where": task.where,
                "sha256": _digest_sources(task),
                "terms": terms,
            }
            result = finished.get(_identify_task(head))
            if result is None:
                result = {**head, **_import_task(task, adoption)}
                # Written as soon as it is known: an interrupt loses the task under way and nothing
                # else.
                results.append(out, result)
                screen.line(
                    text.brief(
                        f"{result['name']}: {_format_outcome(result['outcome'])}{': ' * bool(result['reason'])}{result['reason']}"
                    )
                )
            outcomes.append(result)
    return outcomes


def _import_task(task: PublishedTask | UnreadableTask, adoption: Adoption) -> dict[str, Any]:
    # Unreadable files are rows of the result: a folder with damage must not look complete.
    if isinstance(task, UnreadableTask):
        return {
            "name": task.where,
            "labels": {},
            "claims": {},
            **plain(AdoptionOutcome("unreadable", task.reason)),
        }
    try:
        adopted = adoption.adopt(task)
    except SandboxError:
        # This machine cannot evaluate anything, so the next task would fail too.
        raise
    # A published kernel that cannot be lowered in an unforeseen way costs its own row only.
    except (RuntimeError, ValueError, TypeError) as error:
        adopted = AdoptionOutcome("failed", f"{type(error).__name__}: {error}")
    return {
        "name": task.name,
        "labels": dict(task.labels),
        "claims": dict(task.claims),
        **plain(adopted),
    }


def _select_tasks(
    tasks: Iterator[PublishedTask | UnreadableTask], args: argparse.Namespace
) -> Iterator[PublishedTask | UnreadableTask]:
    count = 0
    for task in tasks:
        if (
            args.level is None
            # A file that cannot be read has no level, and is reported in any case.
            or isinstance(task, UnreadableTask)
            or task.labels.get("level_id") == args.level
        ):
            # Tasks are read one by one, so the files behind the limit are not opened.
            if args.limit is not None and count >= args.limit:
                return
            count += 1
            yield task


def _describe_terms(place: TuneContext) -> dict[str, Any]:
    """Under what a result was made: another machine, contract, threshold or cache makes it none."""
    rules = {
        # What decides between accepted and not faster enough.
        "margin": place.settings.margin,
        "min_saving_us": place.settings.min_saving_us,
        "budget_s": place.settings.budget_s,
    }
    where = {"device": str(place.device), "cache": str(place.cache.root.resolve())}
    return {"contract": plain(place.contract), "target": plain(place.target), **rules, **where}


def _identify_task(result: Mapping[str, Any]) -> tuple[str, str]:
    # By digest of both sources: after an edit of either the task is done again.
    return str(result["where"]), json.dumps(result["sha256"], sort_keys=True)


def _digest_sources(task: PublishedTask | UnreadableTask) -> dict[str, str]:
    if isinstance(task, UnreadableTask):
        return {}
    return {"reference": sha256(task.reference), "candidate": sha256(task.candidate or "")}


def _name(task: PublishedTask | UnreadableTask) -> str:
    return task.name if isinstance(task, PublishedTask) else task.where


def _format_outcome(outcome: str) -> str:
    return outcome.replace("_", " ")


def _iter_regions(
    args: argparse.Namespace,
    settings: Settings,
    progress: ProgressCallback,
    failed: list[TargetError],
) -> Iterator[tuple[Region, TuneContext]]:
    place = make_context(torch.device(device.choose(args.device)), settings)
    for target in args.target:
        try:
            # One target at a time, so that a folder of large models needs the memory of one.
            for single in targets.expand(target):
                progress(single, None)
                (loaded,) = targets.load(single, device=place.device.type)
                targets.try_call(loaded)
                # FlashInfer-Trace describes inference kernels, so the inference regions are looked
                # up.
                with torch.no_grad():
                    yield from (
                        (region, place) for region in capture_regions(loaded.module, loaded.inputs)
                    )
        except NotLowerableError as error:
            failed.append(TargetError(target, f"it cannot be traced: {error.reason}"))
        except TargetError as error:
            failed.append(error)


def _export_region(region: Region, place: TuneContext) -> ExportedEntry | Refusal:
    # The own cache alone: kernels of other publishers are exported by their publishers.
    hit = resolve(region, (place.cache,), place.target, place.contract).hit
    # A stale entry was measured on another machine or under other versions: its numbers would be
    # false in the trace.
    if hit is None or hit.stale is not None:
        return Refusal(
            hit.stale if hit is not None and hit.stale else "the cache holds no decision for it"
        )
    return export_entry(region, hit.entry)


def _write_files(root: Path, export: ExportedEntry) -> list[str]:
    """The three files, below the folder that FlashInfer-Trace expects them in."""
    name = export.definition.name
    trace = json.dumps(plain(export.trace.to_json()), allow_nan=False) + "\n"
    # FlashInfer-Trace has a workload as a trace without solution and evaluation.
    workload = json.dumps({**export.trace.to_json(), "solution": None, "evaluation": None}) + "\n"
    files = {
        f"definitions/{export.definition.op_type}/{name}.json": json.dumps(
            export.definition.to_json(), indent=2
        )
        + "\n",
        f"solutions/{export.definition.op_type}/{name}/{export.solution.name}.json": json.dumps(
            export.solution.to_json(), indent=2
        )
        + "\n",
        f"workloads/{export.definition.op_type}/{name}.jsonl": workload,
        f"traces/{export.definition.op_type}/{name}.jsonl": trace,
    }
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content, encoding="utf-8")
    return list(files)
