"""Kernels as others publish them, read from files into tasks: a reference and somebody's source for
it, both as texts.

Three forms: a CUDA-L1 release file; KernelBench-style files, alone or in folders; a
FlashInfer-Trace folder (see `flashinfer`). What is no task is a `Damaged` with its reason, and the
rest is read on. Nothing that is read here is run or believed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_cudal1.core.kernelbench_format import NAMES
from torch_cudal1.ingest.formats import flashinfer_tasks
from torch_cudal1.ingest.formats.cuda_l1 import BadLine, read_lines
from torch_cudal1.ingest.formats.published_task import Damaged, Task

__all__ = ["Damaged", "Task", "tasks_in"]

_CANDIDATE = "ModelNew"
_SOURCE_BYTES = 4 << 20


def tasks_in(path: Path, references: Path | None = None) -> Iterator[Task | Damaged]:
    """The tasks of a file or folder. `references`: KernelBench-style file or folder, where
    candidates stand in files of their own.

    Raises OSError for a path that is not there.
    """
    if path.is_dir():
        yield from (
            flashinfer_tasks.tasks_in(path)
            if flashinfer_tasks.is_dataset(path)
            else _folder(path, references)
        )
    elif path.suffix == ".py":
        yield _pair(path, path.name, _Known.of(references))
    else:
        yield from _release(path)


def _release(path: Path) -> Iterator[Task | Damaged]:
    for line in read_lines(path):
        where = f"{path}:{line.number}"
        if isinstance(line, BadLine):
            yield Damaged(where, line.reason)
        else:
            labels = {"level_id": line.level, "task_id": line.task}
            yield Task(where, line.name, line.reference, line.candidate, line.scores, labels)


def _folder(path: Path, references: Path | None) -> Iterator[Task | Damaged]:
    files = sorted(
        p
        for p in path.rglob("*.py")
        if not any(part.startswith((".", "_")) for part in p.relative_to(path).parts)
    )
    known, found = _Known.of(references), False
    for file in files:
        task = _pair(file, str(file.relative_to(path)), known)
        own_reference = (
            isinstance(task, Damaged) and references is None and set(NAMES) <= _defined(file)
        )
        if not own_reference:  # a task's description without a candidate is nothing to import
            found = True
            yield task
    if not found:
        yield Damaged(
            str(path), f"no Python file below it defines {_CANDIDATE} ({len(files)} were looked at)"
        )


@dataclass(frozen=True)
class _Known:
    """Reference files: one for all candidates, or a folder of them by the names of candidates."""

    root: Path | None
    files: Sequence[Path] = field(default=())

    @classmethod
    def of(cls, root: Path | None) -> _Known:
        return cls(
            root, tuple(sorted(root.rglob("*.py"))) if root is not None and root.is_dir() else ()
        )

    def of_candidate(self, name: str) -> Path | str:
        """The reference of the candidate at `name` below its folder, or why there is none.

        That is the file at the same place, or else of those whose name the candidate's begins with
        the one with the longest.
        """
        if self.root is None or not self.root.is_dir():
            return (
                self.root
                or f"it defines no {', no '.join(NAMES)}, and no --reference says where those are"
            )
        same = self.root / name
        if same in self.files:
            return same
        stem = Path(name).stem
        alike = [
            file
            for file in self.files
            if stem == file.stem or stem.startswith((f"{file.stem}_", f"{file.stem}."))
        ]
        longest = max((len(file.stem) for file in alike), default=0)
        best = [file for file in alike if len(file.stem) == longest]
        if len(best) == 1:
            return best[0]
        several = (
            f"{len(best)} references fit its name, such as {best[0]}"
            if best
            else "no reference has its name"
        )
        return f"{several}; expected {same}"


def _pair(file: Path, name: str, known: _Known) -> Task | Damaged:
    if _CANDIDATE not in (defined := _defined(file)):
        return Damaged(str(file), f"it defines no {_CANDIDATE} at its top level, or is no Python")
    reference = file if known.root is None and set(NAMES) <= defined else known.of_candidate(name)
    if isinstance(reference, str):
        return Damaged(str(file), reference)
    try:
        return Task(
            str(file),
            name.removesuffix(".py"),
            _text(reference),
            _text(file),
            labels={"reference": str(reference)},
        )
    except OSError as error:
        return Damaged(str(file), f"{type(error).__name__}: {error}")


def _defined(file: Path) -> set[str]:
    """Names bound at the top of a file; none for one that cannot be read or is not Python."""
    try:
        tree = ast.parse(_text(file))
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return set()
    names = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    targets = [
        target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    ]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def _text(file: Path) -> str:
    """Bad bytes are replaced: the text still reaches whoever refuses it. Raises OSError, also for a
    file too large for a source.
    """
    size = file.stat().st_size
    if size > _SOURCE_BYTES:
        raise OSError(f"{file} has {size} bytes, a source at most {_SOURCE_BYTES}")
    return file.read_text(encoding="utf-8", errors="replace")
