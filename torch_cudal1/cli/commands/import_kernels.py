"""`cudal1 import-kernels PATH` and `export-kernels TARGET`: kernels that others published, and ours
in a form that others read.

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
from torch_cudal1.core.report import plain
from torch_cudal1.core.settings import Settings
from torch_cudal1.core.version import __version__
from torch_cudal1.graph.captured import captured_regions
from torch_cudal1.ingest.formats.flashinfer_export import Exported, NotExpressible, exported
from torch_cudal1.ingest.formats.published_tasks import Damaged, Task, tasks_in
from torch_cudal1.ingest.published.adopt import Adopted, Adoption
from torch_cudal1.ir.records import Region
from torch_cudal1.judge.evaluate.source_evaluator import PairJob
from torch_cudal1.store.cache.resolve import resolve
from torch_cudal1.store.context import Place, place_for

__all__ = ["export_kernels", "import_kernels"]

SCHEMA = 1
_FOUND_WRONG = 1
_KEYS = frozenset({"where", "sha256", "terms", "outcome", "reason"})
_AGAIN = ("not_judged", "failed")
_UNWELL = ("reference_unusable", "unreadable", *_AGAIN)
_ORDER = ("accepted", "not_faster", "rejected", "not_lowerable", "withdrawn", *_UNWELL)
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
    """Take every task the whole way. Exit code for one task as `judge`'s; for several 0, or 1 if
    something could not be read.
    """
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
    place = place_for(torch.device(device.choose(args.device)), settings)
    job = PairJob(
        settings, place.contract, place.device, gradients=False, trust="foreign", drop_in=False
    )
    found = list(
        _limited((task for path in args.path for task in tasks_in(path, args.reference)), args)
    )
    out = args.json if isinstance(args.json, Path) else None
    made = _all(found, place, job, out, screen)
    rows = [
        [
            _spoken(one["outcome"]),
            one["name"],
            text.speedup(one["low"]),
            text.brief(one["reason"], 100),
        ]
        for one in made
    ]
    if rows:
        screen.line("")
        screen.table(("outcome", "task", "at least", "reason"), rows)
    counts = Counter(one["outcome"] for one in made)
    screen.line(
        ", ".join(f"{counts[name]} {_spoken(name)}" for name in _ORDER if counts[name])
        or "nothing to import"
    )
    screen.json(made)
    if len(made) == 1:
        return _CODES[made[0]["outcome"]]
    return _FOUND_WRONG if not made or any(counts[name] for name in _UNWELL) else 0


def export_kernels(args: argparse.Namespace, settings: Settings, screen: Screen) -> int:
    """Write what the cache holds for every TARGET as FlashInfer-Trace files. Exit code 2 if a
    TARGET cannot be loaded.
    """
    made: list[dict[str, Any]] = []
    failed: list[TargetError] = []
    with screen.progress() as progress:
        for region, place in _regions(args, settings, progress, failed):
            found = _exported(region, place)
            paths = _written(args.out, found) if isinstance(found, Exported) else []
            reason = found.reason if isinstance(found, NotExpressible) else ""
            made.append(
                {"region": region.key, "name": region.name, "files": paths, "reason": reason}
            )
    rows = [
        [
            one["region"][:12],
            one["name"],
            ", ".join(one["files"]) or text.ABSENT,
            text.brief(one["reason"]),
        ]
        for one in made
    ]
    if rows:
        screen.table(("region", "name", "written", "why not"), rows)
    screen.json({"exported": made, "failed": [str(error) for error in failed]})
    for error in failed:
        screen.problem(str(error))
    return 2 if failed else 0


def _all(
    found: Sequence[Task | Damaged], place: Place, job: PairJob, out: Path | None, screen: Screen
) -> list[dict[str, Any]]:
    terms = _terms(place)
    earlier = (
        [
            one
            for one in results.read(out, _KEYS)
            if one["terms"] == terms and one["outcome"] not in _AGAIN
        ]
        if out
        else []
    )
    known = {_identity(one): one for one in earlier}
    made: list[dict[str, Any]] = []

    def step(what: str, fraction: float | None) -> None:
        progress(f"{_name(found[len(made)])}: {what}", len(made) / len(found))

    with screen.progress() as progress, Adoption(place, job, step) as adoption:
        for task in found:
            head = {
                "schema": SCHEMA,
                "package": __version__,
                "where": task.where,
                "sha256": _digests(task),
                "terms": terms,
            }
            one = known.get(_identity(head))
            if one is None:
                one = {**head, **_told(task, adoption)}
                results.append(out, one)
                screen.line(
                    text.brief(
                        f"{one['name']}: {_spoken(one['outcome'])}{': ' * bool(one['reason'])}{one['reason']}"
                    )
                )
            made.append(one)
    return made


def _told(task: Task | Damaged, adoption: Adoption) -> dict[str, Any]:
    if isinstance(task, Damaged):
        return {
            "name": task.where,
            "labels": {},
            "claims": {},
            **plain(Adopted("unreadable", task.reason)),
        }
    try:
        adopted = adoption.adopt(task)
    except SandboxError:
        raise  # this machine cannot judge: the next task would fare no better
    except (RuntimeError, ValueError, TypeError) as error:
        adopted = Adopted("failed", f"{type(error).__name__}: {error}")
    return {
        "name": task.name,
        "labels": dict(task.labels),
        "claims": dict(task.claims),
        **plain(adopted),
    }


def _limited(found: Iterator[Task | Damaged], args: argparse.Namespace) -> Iterator[Task | Damaged]:
    kept = 0
    for task in found:
        if (
            args.level is None
            or isinstance(task, Damaged)
            or task.labels.get("level_id") == args.level
        ):
            if args.limit is not None and kept >= args.limit:
                return
            kept += 1
            yield task


def _terms(place: Place) -> dict[str, Any]:
    """Under what a result was made: another machine, contract, threshold or cache makes it none."""
    rules = {
        "margin": place.settings.margin,
        "min_saving_us": place.settings.min_saving_us,
        "budget_s": place.settings.budget_s,
    }
    where = {"device": str(place.device), "cache": str(place.cache.root.resolve())}
    return {"contract": plain(place.contract), "target": plain(place.target), **rules, **where}


def _identity(one: Mapping[str, Any]) -> tuple[str, str]:
    return str(one["where"]), json.dumps(one["sha256"], sort_keys=True)


def _digests(task: Task | Damaged) -> dict[str, str]:
    if isinstance(task, Damaged):
        return {}
    return {"reference": sha256(task.reference), "candidate": sha256(task.candidate or "")}


def _name(task: Task | Damaged) -> str:
    return task.name if isinstance(task, Task) else task.where


def _spoken(outcome: str) -> str:
    return outcome.replace("_", " ")


def _regions(
    args: argparse.Namespace,
    settings: Settings,
    progress: ProgressCallback,
    failed: list[TargetError],
) -> Iterator[tuple[Region, Place]]:
    place = place_for(torch.device(device.choose(args.device)), settings)
    for target in args.target:
        try:
            for single in targets.expand(target):
                progress(single, None)
                (loaded,) = targets.load(single, device=place.device.type)
                targets.try_call(loaded)
                with torch.no_grad():
                    yield from (
                        (region, place) for region in captured_regions(loaded.module, loaded.inputs)
                    )
        except NotLowerableError as error:
            failed.append(TargetError(target, f"it cannot be traced: {error.reason}"))
        except TargetError as error:
            failed.append(error)


def _exported(region: Region, place: Place) -> Exported | NotExpressible:
    hit = resolve(region, (place.cache,), place.target, place.contract).hit
    if hit is None or hit.stale is not None:
        return NotExpressible(
            hit.stale if hit is not None and hit.stale else "the cache holds no decision for it"
        )
    return exported(region, hit.entry)


def _written(root: Path, found: Exported) -> list[str]:
    """The three files, below the folder that FlashInfer-Trace expects them in."""
    name = found.definition.name
    trace = json.dumps(plain(found.trace.to_json()), allow_nan=False) + "\n"
    workload = json.dumps({**found.trace.to_json(), "solution": None, "evaluation": None}) + "\n"
    files = {
        f"definitions/{found.definition.op_type}/{name}.json": json.dumps(
            found.definition.to_json(), indent=2
        )
        + "\n",
        f"solutions/{found.definition.op_type}/{name}/{found.solution.name}.json": json.dumps(
            found.solution.to_json(), indent=2
        )
        + "\n",
        f"workloads/{found.definition.op_type}/{name}.jsonl": workload,
        f"traces/{found.definition.op_type}/{name}.jsonl": trace,
    }
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content, encoding="utf-8")
    return list(files)
