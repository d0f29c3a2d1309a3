"""Measures all programs of all tasks. Each row is written to the journal soon after it is measured,
and is not measured again.

Tasks are measured in the given order, so that the complete ones can be published when the time is
up. While one batch is validated, the naive evaluator measures the refused programs of the batch
before. One process writes. A failure of the machine raises; a failure of a program is its row.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeAlias

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.llm.journal import SampleJournal
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.landscape.landscape_file import LandscapeError
from torch_cudal1.training.landscape.naive_pool import NaivePool
from torch_cudal1.training.landscape.rows import LandscapeRow

__all__ = [
    "ROWS",
    "Survey",
    "SurveyProgress",
    "decode_programs",
    "read_rows",
    "select_complete_tasks",
]

ROWS = "rows.jsonl"
# A landscape has thousands of failures, and messages of a compiler run to pages.
_MAX_DETAIL_CHARS = 160
# Small, so that a machine on which nothing runs is noticed soon.
_FIRST_BATCH = 16


@dataclass(frozen=True)
class SurveyProgress:
    """The state after a batch: rows in the journal, rows of this run, seconds of this run, and the
    task.
    """

    rows: int
    fresh: int
    seconds: float
    task: str


Question: TypeAlias = tuple[TrainingTask, list[Decoded]]
PendingRow: TypeAlias = tuple[LandscapeRow, Future[float | None]]


class BatchEvaluator(Protocol):
    """What `judge.pool.judge_evaluator.JudgeEvaluator` does for several tasks at once. `on_measurement`: called
    with each measurement as it is made.
    """

    on_measurement: Callable[[Measured], None] | None

    def measure_all(self, questions: Sequence[Question]) -> list[list[Measured]]:
        """One measurement for each program of each task, in order."""
        ...


@dataclass
class Survey:
    """Measures by `judge` and `naive`; `folder` holds the journal. `batch`: programs in one
    request; the first request has fewer.
    """

    folder: Path
    codec: KslCodec
    judge: BatchEvaluator
    naive: NaivePool
    batch: int = 32
    _pending: list[PendingRow] = field(default_factory=list)

    def run(
        self,
        tasks: Sequence[TrainingTask],
        *,
        budget_s: float,
        report: Callable[[SurveyProgress], None],
    ) -> int:
        """Measure the programs that the journal lacks until the time is up. Returns how many rows
        were added. Raises what the evaluators raise.
        """
        journal = SampleJournal(self.folder / ROWS)
        rows_before, start_s = len(journal.keys()), time.monotonic()
        try:
            # The time is looked at between batches only: a batch that was begun is finished and
            # written.
            for questions in self._make_batches(tasks, journal):
                if time.monotonic() - start_s >= budget_s:
                    break
                self._measure(questions, journal)
                rows, seconds = len(journal.keys()), time.monotonic() - start_s
                report(SurveyProgress(rows, rows - rows_before, seconds, questions[-1][0].id))
        # Also when the judge raises: these rows are measured, and only wait for the naive
        # evaluator.
        finally:
            self._write_pending(self._pending, journal)
            self._pending = []
        return len(journal.keys()) - rows_before

    def _make_batches(
        self, tasks: Sequence[TrainingTask], journal: SampleJournal
    ) -> Iterator[list[Question]]:
        """Yield batches of at most `batch` programs. The end of a task and the beginning of the
        next share a batch, so that no slot is idle.
        """
        questions: list[Question] = []
        free_places = min(self.batch, _FIRST_BATCH)
        for task in tasks:
            programs = [
                program
                for program in decode_programs(self.codec, task)
                if journal.get(_make_key(task.id, program.program)) is None
            ]
            while programs:
                questions.append((task, programs[:free_places]))
                programs, free_places = programs[free_places:], free_places - len(questions[-1][1])
                if not free_places:
                    yield questions
                    questions, free_places = [], self.batch
        if questions:
            yield questions

    def _measure(self, questions: Sequence[Question], journal: SampleJournal) -> None:
        """Validate a batch and write its rows as they come; then the pending rows of the batch
        before. Rows of the very first batch are checked before they are written.
        """
        questions_by_key = {
            _make_key(task.id, program.program): (task, program)
            for task, programs in questions
            for program in programs
        }
        # Swapped before this batch is recorded: its refused programs are asked about beside the
        # next batch, while the judge is at work.
        earlier_rows, self._pending = self._pending, []

        def record_once(measurement: Measured) -> None:
            # Popped, since a measurement comes twice: as it is made, and with the answer of the
            # whole batch.
            question = questions_by_key.pop(_make_key(measurement.task, measurement.program), None)
            if question is not None:
                self._record(*question, measurement, journal)

        # Not for the very first batch of a folder: rows of a machine on which nothing runs must not
        # be written.
        self.judge.on_measurement = record_once if journal.keys() else None
        answers = self.judge.measure_all(questions)
        measurements = [measurement for answer in answers for measurement in answer]
        if not journal.keys():
            _check_first_batch(measurements)
        self._write_pending(earlier_rows, journal)
        for measurement in measurements:
            record_once(measurement)

    def _record(
        self, task: TrainingTask, program: Decoded, measurement: Measured, journal: SampleJournal
    ) -> None:
        row = _make_row(program, measurement)
        # Programs that ran and were refused. One that did not compile or run is refused by the
        # naive evaluator too, and for an accepted one it has nothing to add.
        if row.outcome in ("wrong", "hack", "unstable"):
            self._pending.append((row, self.naive.submit(task, program)))
        else:
            journal.add(_make_key(row.task, row.program), row.to_json())

    @staticmethod
    def _write_pending(pending: Sequence[PendingRow], journal: SampleJournal) -> None:
        """Write rows with the naive evaluator's answer."""
        for row, naive_speedup in pending:
            complete_row = replace(row, naive=naive_speedup.result())
            journal.add(_make_key(row.task, row.program), complete_row.to_json())


def _check_first_batch(measurements: Sequence[Measured]) -> None:
    """Raise LandscapeError if no program of the first batch ran, since the machine is then at
    fault. Nothing is written.
    """
    outcomes = {measurement.outcome for measurement in measurements}
    # Broken programs are part of every space, but not in the first places, where defaults stand.
    # Rows of a broken machine would otherwise be published as failures of its programs.
    if outcomes and outcomes <= {"compile", "run"}:
        first = measurements[0]
        raise LandscapeError(
            f"none of the first {len(measurements)} programs of {first.task} ran, so none was kept; "
            f"the first one, {first.program}: {first.detail}"
        )


def _make_row(program: Decoded, measurement: Measured) -> LandscapeRow:
    """A measurement as a row of a landscape: short reasons, ratios with four digits."""
    detail = " ".join(measurement.detail.split())[:_MAX_DETAIL_CHARS]
    digest = hashlib.sha256(program.source.encode()).hexdigest()[:12]
    return LandscapeRow(
        measurement.task,
        measurement.program,
        measurement.outcome,
        measurement.score,
        # Far below the noise of a bucket (1 % and more), and short in the file.
        tuple(round(ratio, 4) for ratio in measurement.buckets),
        detail,
        digest,
    )


def read_rows(folder: Path) -> dict[str, list[LandscapeRow]]:
    """The rows in the journal of a folder, by task."""
    journal = SampleJournal(folder / ROWS)
    rows_by_task: dict[str, list[LandscapeRow]] = {}
    for key in journal.keys():  # noqa: SIM118  a journal is no dictionary
        row = LandscapeRow.from_json(journal.get(key) or {})
        rows_by_task.setdefault(row.task, []).append(row)
    return rows_by_task


def select_complete_tasks(
    codec: KslCodec, tasks: Sequence[TrainingTask], rows: Mapping[str, Sequence[LandscapeRow]]
) -> dict[str, tuple[LandscapeRow, ...]]:
    """Rows of the tasks whose programs were all measured, in the order of tasks and programs."""
    complete_tasks = {}
    for task in tasks:
        rows_by_program = {row.program: row for row in rows.get(task.id, ())}
        texts = [program.text for program in codec.programs(task)]
        # A task with a hole is left out: a policy could write the missing program, and its look-up
        # would end the run.
        if all(text in rows_by_program for text in texts):
            complete_tasks[task.id] = tuple(rows_by_program[text] for text in texts)
    return complete_tasks


def decode_programs(codec: KslCodec, task: TrainingTask) -> Iterator[Decoded]:
    """Every program of a task with its source."""
    for program in codec.programs(task):
        decoded = codec.decode(task, program.text)
        # A space that lists a program which its grammar refuses is a defect of this package.
        if isinstance(decoded, Refusal):
            raise ValueError(
                f"{task.id}: {program.text} of its own programs does not parse: {decoded.reason}"
            )
        yield decoded


def _make_key(task: str, program: str) -> str:
    return f"{task} {program}"
