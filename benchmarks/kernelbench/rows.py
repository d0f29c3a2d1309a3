"""The file of results: one JSON object a task, appended as soon as it is known, read back to
continue a run and to report.

A row belongs to a task (its source's digest), a job and an environment. When a run continues, a row
counts only where task, job and GPU are all the same. A row holds no path, host name or user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernelbench.job import Job
from benchmarks.kernelbench.tasks import Task
from benchmarks.report import SCHEMA
from torch_cudal1.cli.commands import results

__all__ = ["append_row", "list_finished", "read_rows"]

_KEYS = frozenset({"kind", "schema", "job", "task", "columns", "against", "environment", "of"})


def append_row(
    out: Path,
    task: Task,
    row: Mapping[str, Any],
    job: Job,
    environment: Mapping[str, Any],
    *,
    of: int,
) -> None:
    """Add a task's row; `of`: how many tasks the whole benchmark has."""
    about = {"key": task.key, "level": task.level, "number": task.number, "name": task.name}
    about |= {"sizes": task.sizes, "scale": task.scale, "sha256": task.digest}
    out.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "schema": SCHEMA,
        "kind": "kernelbench",
        "task": about,
        "job": job.to_json(),
        "precision": job.label,
        "of": of,
    }
    results.append(out, {**head, **row, "environment": dict(environment)})


def read_rows(*files: Path) -> list[dict[str, Any]]:
    """Every readable row of those files, only the newest of each task and job, by level and number."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file in files:
        for row in results.read(file, _KEYS):
            if row["kind"] == "kernelbench" and row["schema"] == SCHEMA:
                newest[
                    str(row["job"]),
                    row["task"]["key"],
                    row["task"]["sha256"],
                    row["environment"]["gpu"],
                ] = row
    return sorted(newest.values(), key=lambda row: (row["task"]["level"], row["task"]["number"]))


def list_finished(
    files: Sequence[Path], job: Job, tasks: Sequence[Task], *, without_failed: bool = False
) -> set[tuple[str, str]]:
    """Keys and digests of the tasks that have a row in `files` under this job; with
    `without_failed` only those without a failed column.
    """
    requested, job_values = {(task.key, task.digest) for task in tasks}, job.to_json()
    matching = [row for row in read_rows(*files) if row["job"] == job_values]
    if without_failed:
        matching = [
            row
            for row in matching
            if all(column["status"] != "failed" for column in row["columns"].values())
        ]
    return {(row["task"]["key"], row["task"]["sha256"]) for row in matching} & requested
