"""Goes through all programs of all tasks: what is measured is on the disk before the next is asked, and is not measured again.

Tasks come in the order given, each measured whole before the next, so that whatever is done when the time is up can be published.
One process writes. A failure of the machine raises; what a program does wrong is its row.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch_cudal1.training.journal import Journal
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.landscape.packed import LandscapeError
from torch_cudal1.training.landscape.rows import Row
from torch_cudal1.training.landscape.trusting import Trusting
from torch_cudal1.training.records import Decoded, Evaluator, Measured, TrainingTask, Undecodable

__all__ = ["ROWS", "Progress", "Survey", "complete", "decoded", "rows_on_record"]

ROWS = "rows.jsonl"
_TRIES = 3  # of a measurement that was not steady
_WORDS = 160


@dataclass(frozen=True)
class Progress:
    """After each batch: rows in the journal, rows of this run, seconds of this run, and the task."""

    rows: int
    fresh: int
    seconds: float
    task: str


@dataclass
class Survey:
    """`judge` and `naive` measure, `folder` holds the journal. `batch`: programs asked at once; a kill loses at most so many."""

    folder: Path
    codec: KslCodec
    judge: Evaluator
    naive: Trusting
    batch: int = 32

    def run(self, tasks: Sequence[TrainingTask], *, budget_s: float, told: Callable[[Progress], None]) -> int:
        """Measure what the journal lacks until the time is up; how many rows were added. Raises what the evaluators raise."""
        journal = Journal(self.folder / ROWS)
        started, fresh = time.monotonic(), 0
        for task, programs in self._batches(tasks, journal):
            if time.monotonic() - started >= budget_s:
                break
            rows = list(self._rows(task, programs))
            if not fresh:
                _refuse_a_dead_start(rows)
            for row in rows:
                journal.add(_key(row.task, row.program), row.to_json())
            fresh += len(rows)
            told(Progress(len(journal.keys()), fresh, time.monotonic() - started, task.id))
        return fresh

    def _batches(self, tasks: Sequence[TrainingTask], journal: Journal) -> Iterator[tuple[TrainingTask, list[Decoded]]]:
        for task in tasks:
            left = [one for one in decoded(self.codec, task) if journal.get(_key(task.id, one.program)) is None]
            for start in range(0, len(left), self.batch):
                yield task, left[start : start + self.batch]

    def _rows(self, task: TrainingTask, programs: Sequence[Decoded]) -> Iterator[Row]:
        found = {one.program: one for one in self.judge.measure(task, programs)}
        for _ in range(_TRIES - 1):
            shaky = [program for program in programs if found[program.program].outcome == "unstable"]
            if not shaky:
                break
            found |= {one.program: one for one in self.judge.measure(task, shaky)}
        for program in programs:
            row = _row(program, found[program.program])
            asked = row.outcome in ("wrong", "hack", "unstable")
            yield replace(row, naive=self.naive.speedup(task, program)) if asked else row


def _refuse_a_dead_start(rows: Sequence[Row]) -> None:
    """Where no program of the first batch even ran, the machine is at fault. Raises LandscapeError; nothing is written."""
    if rows and all(row.outcome in ("compile", "run") for row in rows):
        told = f"{rows[0].program}: {rows[0].detail}"
        raise LandscapeError(
            f"none of the first {len(rows)} programs of {rows[0].task} ran, so none was kept; the first one, {told}"
        )


def _row(program: Decoded, found: Measured) -> Row:
    """A measurement as a landscape keeps it: reasons short, ratios with four digits."""
    detail = " ".join(found.detail.split())[:_WORDS]
    digest = hashlib.sha256(program.source.encode()).hexdigest()[:12]
    return Row(found.task, found.program, found.outcome, found.score, tuple(round(one, 4) for one in found.buckets), detail, digest)


def rows_on_record(folder: Path) -> dict[str, list[Row]]:
    """What the journal of a folder holds, by task."""
    journal = Journal(folder / ROWS)
    found: dict[str, list[Row]] = {}
    for key in journal.keys():  # noqa: SIM118  a journal is no dictionary
        row = Row.from_json(journal.get(key) or {})
        found.setdefault(row.task, []).append(row)
    return found


def complete(codec: KslCodec, tasks: Sequence[TrainingTask], rows: Mapping[str, Sequence[Row]]) -> dict[str, tuple[Row, ...]]:
    """Rows of the tasks that were measured whole, in the order of tasks and programs."""
    whole = {}
    for task in tasks:
        known = {row.program: row for row in rows.get(task.id, ())}
        wanted = [program.text for program in codec.programs(task)]
        if all(text in known for text in wanted):
            whole[task.id] = tuple(known[text] for text in wanted)
    return whole


def decoded(codec: KslCodec, task: TrainingTask) -> Iterator[Decoded]:
    """Every program of a task with its source."""
    for program in codec.programs(task):
        found = codec.decode(task, program.text)
        if isinstance(found, Undecodable):
            raise ValueError(f"{task.id}: a program of the space that is none: {found.reason}")
        yield found


def _key(task: str, program: str) -> str:
    return f"{task} {program}"
