"""The performance-indexed database: every sample that was measured, in one append-only journal, and
views of it for prompts.

A journal is JSON lines: a header, samples, and commits. What a prompt shows is drawn from a *view*,
the programs as of a committed generation, so every member of a group and every rank draws from the
same set whatever is being measured meanwhile. Failures are on record and never in a view. A sample
has a name and counts once, however often it is handed in. A file cut short loses its last line; a
line that cannot be read is passed over, and its number is kept in `damaged`.

One process writes at a time; any number may read. It decides nothing about prompts (`selectors`
does) and measures nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from torch_cudal1.core.errors import SettingError
from torch_cudal1.judge.pool.measured import Measured

__all__ = ["Database", "DatabaseView", "StoredSample", "Success", "digest"]

SCHEMA = 1
# A program with one such outcome is never shown, whatever it scored at other times. Outcomes that
# are missing here, such as an unstable timing, say nothing against the program.
_BARRED = frozenset({"wrong", "hack", "compile", "run", "undecodable"})


@dataclass(frozen=True)
class StoredSample:
    """One measurement on record. `name`: unique; `generation`: the commit that it came with, 0
    until there was one.

    `origin`: who wrote the program. `exemplars`: digests of what its prompt had shown.
    """

    name: str
    measured: Measured
    source: str = ""
    origin: str = ""
    exemplars: tuple[str, ...] = ()
    generation: int = 0


@dataclass(frozen=True)
class Success:
    """A program that may be shown. `score`: the median of all its scores. `since`: the generation
    that brought it.
    """

    program: str
    score: float
    count: int = 1
    since: int = 0
    source: str = field(default="", repr=False)

    @cached_property
    def digest(self) -> str:
        """Of the program's text."""
        return digest(self.program)


@dataclass(frozen=True)
class DatabaseView:
    """The successes of all tasks as of a generation, each program once, best last. A pure function
    of journal and generation.
    """

    generation: int
    tasks: Mapping[str, Sequence[Success]]

    def entries(self, task: str) -> Sequence[Success]:
        """A task's programs, worst to best; none for a task without a success."""
        return self.tasks.get(task, ())

    def best(self, task: str) -> float | None:
        """The highest score of a task."""
        entries = self.entries(task)
        return entries[-1].score if entries else None


class Database:
    """A journal that is read once and then appended to. Use it as a context manager, or `close` it."""

    def __init__(self, path: Path | None, *, write: bool = True) -> None:
        """Read `path`; None: a database of this process only.

        Raises SettingError for a file that is no journal, one of a newer form, and one that another
        process writes.
        """
        self.path = path
        self.generation = 0
        # The numbers of lines that could not be read, for the user's report.
        self.damaged: list[int] = []
        self._samples: dict[str, StoredSample] = {}
        self._pending: list[str] = []
        self._views: dict[int, DatabaseView] = {}
        self._lock: FileLock | None = None
        self._file: int | None = None
        if path is not None and write:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Before reading: a writer that still appends would make this process cut its last line
            # off.
            self._lock = _claim_lock(path)
        try:
            if path is not None and path.exists():
                self._read(path, write)
            if path is not None and write:
                # Unbuffered: a line is with the operating system when `_write` returns, so a kill
                # of this process does not lose it.
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                # The header is for an empty file too: a kill may come between creating the file and
                # writing it.
                if not os.fstat(self._file).st_size:
                    self._write({"kind": "header", "schema": SCHEMA})
        except BaseException:
            # KeyboardInterrupt too: the lock must not outlive a constructor that failed.
            self.close()
            raise

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._samples)

    def close(self) -> None:
        """Close the file and release the lock. Safe to call twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def has(self, name: str) -> bool:
        """Whether a sample of this name is on record: it need not be measured again."""
        return name in self._samples

    def get(self, name: str) -> StoredSample | None:
        """The sample of that name."""
        return self._samples.get(name)

    def add(self, sample: StoredSample) -> bool:
        """Put a sample on record; False if its name is there already, and nothing changes. It
        survives a kill of this process; views show it after `commit`.
        """
        if sample.name in self._samples:
            return False
        # Generation 0 until a commit: views do not show the samples of a round that is under way.
        self._keep(StoredSample(**{**vars(sample), "generation": 0}))
        self._write(_sample_json(sample))
        return True

    def settle(self) -> int:
        """`commit` where a sample is not committed yet: asked again after a kill, it makes no
        further generation.
        """
        return self.commit() if self._pending else self.generation

    def commit(self) -> int:
        """Make all samples so far a new generation, on the disk, and return its number."""
        self._write({"kind": "commit", "generation": self.generation + 1})
        if self._file is not None:
            # Only here: a sample survives a kill without it, a commit also a crash of the machine.
            os.fsync(self._file)
        self._settle(self.generation + 1)
        return self.generation

    def samples(
        self, task: str | None = None, *, up_to: int | None = None
    ) -> Iterator[StoredSample]:
        """Samples in the order of the journal, failures too. `up_to`: only those of generations up
        to that one.
        """
        for sample in self._samples.values():
            if task is not None and sample.measured.task != task:
                continue
            # Generation 0 is "not committed yet", so it belongs to no view.
            if up_to is None or 0 < sample.generation <= up_to:
                yield sample

    def view(self, generation: int | None = None) -> DatabaseView:
        """The successes as of a committed generation, the last one by default. Raises ValueError
        for one that is not there.
        """
        digest = self.generation if generation is None else generation
        if not 0 <= digest <= self.generation:
            raise ValueError(f"generation {digest}; this database has 0 to {self.generation}")
        if digest not in self._views:
            # Bounded, because each view holds every program.
            while len(self._views) > 3:
                self._views.pop(next(iter(self._views)))
            self._views[digest] = DatabaseView(
                digest, _select_successes(self.samples(up_to=digest))
            )
        return self._views[digest]

    def _keep(self, sample: StoredSample) -> None:
        self._samples[sample.name] = sample
        self._pending.append(sample.name)

    def _settle(self, generation: int) -> None:
        for name in self._pending:
            self._samples[name] = StoredSample(
                **{**vars(self._samples[name]), "generation": generation}
            )
        self._pending.clear()
        self.generation = generation

    def _write(self, row: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        if self._file is None:
            raise ValueError(
                f"{self.path} was opened for reading, or is closed; open it with write=True to "
                f"add to it"
            )
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        # `os.write` may write a part, such as on a full disk or after a signal.
        while line:
            line = line[os.write(self._file, line) :]

    def _read(self, path: Path, write: bool) -> None:
        content = path.read_bytes()
        # A line without its end is what a killed writer left.
        complete, cut = content.rpartition(b"\n")[0::2] if b"\n" in content else (b"", content)
        if cut:
            self.damaged.append(complete.count(b"\n") + 1 + bool(complete))
            if write:
                # Cut off, because the next append would continue the half line.
                os.truncate(path, len(content) - len(cut))
        if not complete:
            return
        lines = complete.split(b"\n")
        _check_header(path, lines[0])
        for number, line in enumerate(lines[1:], start=2):
            if not self._took(line):
                self.damaged.append(number)

    def _took(self, line: bytes) -> bool:
        try:
            row = json.loads(line)
            if row["kind"] == "commit":
                # Never backwards: where a commit's line is damaged, the numbers after it still
                # grow.
                self._settle(max(self.generation + 1, int(row["generation"])))
            elif row["name"] not in self._samples:
                # The first one counts, as in `add`.
                self._keep(_sample_of(row))
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        return True


def digest(program: str) -> str:
    """sha256 of a program's text, shortened to 16 digits."""
    # A model's answer may hold lone surrogates from JSON escapes, which strict UTF-8 refuses.
    return hashlib.sha256(program.encode(errors="surrogatepass")).hexdigest()[:16]


def _claim_lock(path: Path) -> FileLock:
    # Two writers would each append a commit with the same number.
    lock = FileLock(f"{path}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise SettingError(
            "database",
            str(path),
            "a journal that no other process is writing; end that one, or use a copy",
        ) from None
    return lock


def _check_header(path: Path, line: bytes) -> None:
    try:
        schema = int(json.loads(line)["schema"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SettingError(
            "database", str(path), "a journal whose first line is its header"
        ) from None
    # A newer form may mean something else by the same fields.
    if schema > SCHEMA:
        raise SettingError(
            "database",
            str(path),
            f"a journal of schema {SCHEMA} or older; it has {schema}: update this package",
        )


def _sample_json(sample: StoredSample) -> dict[str, Any]:
    measured = sample.measured
    row = {
        "kind": "sample",
        "name": sample.name,
        "task": measured.task,
        "program": measured.program,
        "outcome": measured.outcome,
    }
    more = {
        "score": measured.score,
        "detail": measured.detail,
        "buckets": list(measured.buckets),
        "source": sample.source,
    }
    return (
        row
        | {k: v for k, v in more.items() if v}
        | {"origin": sample.origin, "exemplars": list(sample.exemplars)}
    )


def _sample_of(row: Mapping[str, Any]) -> StoredSample:
    score = row.get("score")
    measured = Measured(
        str(row["task"]),
        str(row["program"]),
        row["outcome"],
        None if score is None else float(score),
        str(row.get("detail", "")),
        tuple(map(float, row.get("buckets", ()))),
    )
    shown = tuple(map(str, row.get("exemplars", ())))
    return StoredSample(
        str(row["name"]), measured, str(row.get("source", "")), str(row.get("origin", "")), shown
    )


def _select_successes(samples: Iterator[StoredSample]) -> dict[str, tuple[Success, ...]]:
    """The programs that may be shown, by task, each program once."""
    scores: dict[tuple[str, str], list[StoredSample]] = {}
    barred: set[tuple[str, str]] = set()
    for sample in samples:
        key = (sample.measured.task, sample.measured.program)
        if sample.measured.outcome == "ok":
            scores.setdefault(key, []).append(sample)
        elif sample.measured.outcome in _BARRED:
            barred.add(key)
    successes: dict[str, list[Success]] = {}
    for (task, program), entry in scores.items():
        if (task, program) not in barred:
            # The median: one lucky measurement must not keep a program at the top.
            median = statistics.median(
                sample.measured.score for sample in entry if sample.measured.score is not None
            )
            since = min(sample.generation for sample in entry)
            # Any rule that ignores the order will do: samples of one generation come in any order,
            # and all ranks must build the same view.
            source = min(sample.source for sample in entry)
            successes.setdefault(task, []).append(
                Success(program, median, len(entry), since, source)
            )
    return {
        task: tuple(sorted(entry, key=lambda entry: (entry.score, entry.digest)))
        for task, entry in sorted(successes.items())
    }
