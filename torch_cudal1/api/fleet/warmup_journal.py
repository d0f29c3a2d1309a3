"""The finished tasks of a warm-up, in a file: an interrupted or killed warm-up goes on from there.

One JSON line a finished task, appended and synced; a torn or foreign line is passed over. A line
counts only while every entry that it names can still be read from the cache. When all tasks are
finished the file is deleted: it remembers an unfinished run and nothing else, so warming the same
targets again always asks the cache. It cannot see that a file which a target imports has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from torch_cudal1.api.fleet.warmup_task import WarmupAnswer, WarmupOrder, WarmupTask
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.version import __version__
from torch_cudal1.device.target import triton_version
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.cache.entry_file import decode_entry
from torch_cudal1.store.cache.files import read_file

__all__ = ["WarmupJournal", "find_journal"]

MAX_JOURNAL_BYTES = 1 << 30


@dataclass(frozen=True)
class WarmupJournal:
    """The finished tasks of one warm-up, in a file."""

    path: Path
    # Folders in one of which the entries of a finished task must still lie.
    caches: tuple[Path, ...]

    def find_finished(self, tasks: Sequence[WarmupTask]) -> dict[WarmupTask, WarmupAnswer]:
        """The answers of those of `tasks` that an earlier run finished and whose entries are still
        there.
        """
        data = read_file(self.path, MAX_JOURNAL_BYTES)
        answers: dict[str, WarmupAnswer] = {}
        for line in [] if isinstance(data, Refusal) else data.splitlines():
            try:
                record = json.loads(line)
                answers[record["task"]] = WarmupAnswer.from_json(record["answer"])
            except (ValueError, KeyError, TypeError, AttributeError):
                # A kill tore this line, or another version wrote it.
                continue
        remembered = {task: answers[task.identity] for task in tasks if task.identity in answers}
        return {
            task: replace(answer, resumed=True)
            for task, answer in remembered.items()
            # A purge may have deleted entries since: such a task is done again.
            if self._is_still_stored(answer)
        }

    def add(self, answer: WarmupAnswer) -> Refusal | None:
        """Append a finished task, to the disk; a refusal where it cannot be written."""
        line = (
            json.dumps({"task": answer.task.identity, "answer": answer.to_json()}, allow_nan=False)
            + "\n"
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Appended in one write: lines of two runs do not mix. After a torn line a new one
            # begins.
            with open(self.path, "ab") as file:
                file.write(b"\n" + line.encode() if self._has_torn_line() else line.encode())
                file.flush()
                # Synced, so that a task that was reported as finished stays so after a crash.
                os.fsync(file.fileno())
        except OSError as error:
            return Refusal(
                f"{self.path} cannot be written, so an interrupted warm-up would start again: {type(error).__name__}: {error}"
            )
        return None

    def close(self) -> None:
        """Delete the file: all tasks are finished."""
        self.path.unlink(missing_ok=True)

    def _has_torn_line(self) -> bool:
        data = read_file(self.path, MAX_JOURNAL_BYTES)
        return not isinstance(data, Refusal) and bool(data) and not data.endswith(b"\n")

    def _is_still_stored(self, answer: WarmupAnswer) -> bool:
        return all(
            any(_is_readable(path) for root in self.caches for path in _find_entry_files(root, key))
            for key in answer.keys
        )


def _find_entry_files(root: Path, key: str) -> list[Path]:
    # A key from a journal's line goes into a path and a pattern, so only letters and digits may be
    # in it.
    return list(root.glob(f"v1/*/*/{key[:2]}/{key}.safetensors")) if key.isalnum() else []


def _is_readable(path: Path) -> bool:
    data = read_file(path, MAX_JOURNAL_BYTES)
    return not isinstance(data, Refusal) and not isinstance(decode_entry(data), Refusal)


def find_journal(order: WarmupOrder, tasks: Sequence[WarmupTask]) -> WarmupJournal:
    """The journal of these tasks under this order, with the versions that decisions depend on."""
    # Decisions of other versions are validated again, so their journal does not count.
    versions = [__version__, torch.__version__, triton_version()]
    identity = [versions, order.to_json(), sorted(task.identity for task in tasks)]
    name = hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:32]
    settings = order.settings
    return WarmupJournal(
        settings.cache_dir / "warmup" / f"{name}.jsonl",
        (settings.cache_dir, *settings.read_only_caches),
    )
