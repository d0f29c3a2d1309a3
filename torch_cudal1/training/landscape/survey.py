"""Goes through all programs of all tasks: what is measured is on the disk soon, and is not measured
again.

Tasks come in the order given, so that whatever is whole when the time is up can be published. While
one batch is judged, a trusting evaluator is asked about what was refused of the one before. One
process writes. A failure of the machine raises; what a program does wrong is its row.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

from torch_cudal1.ingest.llm.journal import Journal
from torch_cudal1.ingest.llm.records import Undecodable
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.landscape.packed import LandscapeError
from torch_cudal1.training.landscape.rows import Row
from torch_cudal1.training.landscape.trusting import Trusting

__all__ = ["ROWS", "Progress", "Survey", "complete", "decoded", "rows_on_record"]

ROWS = "rows.jsonl"
_WORDS = 160
_FIRST = 16  # programs of the first batch of all: whether anything runs here is known soon


@dataclass(frozen=True)
class Progress:
    """After each batch: rows in the journal, rows of this run, seconds of this run, and the task."""

    rows: int
    fresh: int
    seconds: float
    task: str


Question: TypeAlias = tuple[TrainingTask, list[Decoded]]
Waiting: TypeAlias = tuple[Row, Future[float | None]]


class Judge(Protocol):
    """What `measure.JudgeEvaluator` does for several tasks at once. `told`: given each measurement
    as it comes.
    """

    told: Callable[[Measured], None] | None

    def measure_all(self, questions: Sequence[Question]) -> list[list[Measured]]:
        """One measurement for each program of each task, in order."""
        ...


@dataclass
class Survey:
    """`judge` and `naive` measure, `folder` holds the journal. `batch`: programs asked at once; the
    first time fewer.
    """

    folder: Path
    codec: KslCodec
    judge: Judge
    naive: Trusting
    batch: int = 32
    _waiting: list[Waiting] = field(default_factory=list)

    def run(
        self, tasks: Sequence[TrainingTask], *, budget_s: float, told: Callable[[Progress], None]
    ) -> int:
        """Measure what the journal lacks until the time is up; how many rows were added. Raises
        what the evaluators raise.
        """
        journal = Journal(self.folder / ROWS)
        before, started = len(journal.keys()), time.monotonic()
        try:
            for questions in self._batches(tasks, journal):
                if time.monotonic() - started >= budget_s:
                    break
                self._measure(questions, journal)
                fresh = len(journal.keys()) - before
                told(
                    Progress(
                        len(journal.keys()), fresh, time.monotonic() - started, questions[-1][0].id
                    )
                )
        finally:
            self._keep(self._waiting, journal)
            self._waiting = []
        return len(journal.keys()) - before

    def _batches(self, tasks: Sequence[TrainingTask], journal: Journal) -> Iterator[list[Question]]:
        """Of at most `batch` programs; the end of a task and the beginning of the next go together,
        so that nobody waits.
        """
        questions: list[Question] = []
        room = min(self.batch, _FIRST)
        for task in tasks:
            left = [
                one
                for one in decoded(self.codec, task)
                if journal.get(_key(task.id, one.program)) is None
            ]
            while left:
                questions.append((task, left[:room]))
                left, room = left[room:], room - len(questions[-1][1])
                if not room:
                    yield questions
                    questions, room = [], self.batch
        if questions:
            yield questions

    def _measure(self, questions: Sequence[Question], journal: Journal) -> None:
        """Judge a batch, writing as it goes; then what the batch before was waiting for. The very
        first is looked at before.
        """
        asked = {
            _key(task.id, program.program): (task, program)
            for task, programs in questions
            for program in programs
        }
        before, self._waiting = self._waiting, []

        def took(one: Measured) -> None:
            known = asked.pop(_key(one.task, one.program), None)
            if known is not None:
                self._took(*known, one, journal)

        self.judge.told = took if journal.keys() else None
        found = [one for answers in self.judge.measure_all(questions) for one in answers]
        if not journal.keys():
            _refuse_a_dead_start(found)
        self._keep(before, journal)
        for one in found:
            took(one)

    def _took(self, task: TrainingTask, program: Decoded, one: Measured, journal: Journal) -> None:
        row = _row(program, one)
        if row.outcome in ("wrong", "hack", "unstable"):
            self._waiting.append((row, self.naive.later(task, program)))
        else:
            journal.add(_key(row.task, row.program), row.to_json())

    @staticmethod
    def _keep(waiting: Sequence[Waiting], journal: Journal) -> None:
        """Write the rows whose trusting answer was asked for."""
        for row, naive in waiting:
            journal.add(_key(row.task, row.program), replace(row, naive=naive.result()).to_json())


def _refuse_a_dead_start(found: Sequence[Measured]) -> None:
    """Where no program of the first batch even ran, the machine is at fault. Raises LandscapeError;
    nothing is written.
    """
    if found and all(one.outcome in ("compile", "run") for one in found):
        told = f"{found[0].program}: {found[0].detail}"
        raise LandscapeError(
            f"none of the first {len(found)} programs of {found[0].task} ran, so none was kept; the first one, {told}"
        )


def _row(program: Decoded, found: Measured) -> Row:
    """A measurement as a landscape keeps it: reasons short, ratios with four digits."""
    detail = " ".join(found.detail.split())[:_WORDS]
    digest = hashlib.sha256(program.source.encode()).hexdigest()[:12]
    return Row(
        found.task,
        found.program,
        found.outcome,
        found.score,
        tuple(round(one, 4) for one in found.buckets),
        detail,
        digest,
    )


def rows_on_record(folder: Path) -> dict[str, list[Row]]:
    """What the journal of a folder holds, by task."""
    journal = Journal(folder / ROWS)
    found: dict[str, list[Row]] = {}
    for key in journal.keys():  # noqa: SIM118  a journal is no dictionary
        row = Row.from_json(journal.get(key) or {})
        found.setdefault(row.task, []).append(row)
    return found


def complete(
    codec: KslCodec, tasks: Sequence[TrainingTask], rows: Mapping[str, Sequence[Row]]
) -> dict[str, tuple[Row, ...]]:
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
