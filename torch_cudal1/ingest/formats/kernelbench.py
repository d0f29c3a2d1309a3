"""KernelBench-style files as tasks: a reference (`Model`, `get_inputs`, `get_init_inputs`) and a
candidate (`ModelNew`), in one file or in two.

A candidate without a reference of its own is matched with one by its place or its name. A file that
is no task is an `UnreadableTask` with its reason, and the rest is read on. Nothing is run: files
are read as syntax.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_cudal1.core.kernelbench_format import NAMES
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ingest.formats.task import PublishedTask, UnreadableTask

__all__ = ["KernelBenchSources"]

_CANDIDATE = "ModelNew"
_SOURCE_BYTES = 4 << 20


@dataclass(frozen=True)
class KernelBenchSources:
    """KernelBench-style Python files, alone or in folders."""

    name: str = "KernelBench"
    layout: str = "a Python file with `ModelNew`, or a folder of those"

    def recognises(self, path: Path) -> bool:
        """A Python file, or any folder."""
        return path.is_dir() or path.suffix == ".py"

    def read_tasks(
        self, path: Path, references: Path | None
    ) -> Iterator[PublishedTask | UnreadableTask]:
        """One task for each file that defines `ModelNew`."""
        if path.is_dir():
            yield from _read_folder(path, references)
        else:
            yield _read_pair(path, path.name, _ReferenceFiles.of(references))


def _read_folder(path: Path, references: Path | None) -> Iterator[PublishedTask | UnreadableTask]:
    # `Format.read_tasks` promises a stable order.
    files = sorted(
        p
        for p in path.rglob("*.py")
        # Hidden folders (virtual environments, version control) and private modules hold no tasks.
        if not any(part.startswith((".", "_")) for part in p.relative_to(path).parts)
    )
    reference_files, any_task = _ReferenceFiles.of(references), False
    for file in files:
        task = _read_pair(file, str(file.relative_to(path)), reference_files)
        own_reference = (
            isinstance(task, UnreadableTask)
            and references is None
            and set(NAMES) <= _list_top_level_names(file)
        )
        # KernelBench's own task files lie beside candidates; a task without a candidate is nothing
        # to import, and no error either.
        if not own_reference:
            any_task = True
            yield task
    if not any_task:
        yield UnreadableTask(
            f"no Python file below it defines {_CANDIDATE} ({len(files)} were looked at)", str(path)
        )


@dataclass(frozen=True)
class _ReferenceFiles:
    """Reference files: one for all candidates, or a folder of them by the names of candidates."""

    root: Path | None
    files: Sequence[Path] = field(default=())

    @classmethod
    def of(cls, root: Path | None) -> _ReferenceFiles:
        return cls(
            root, tuple(sorted(root.rglob("*.py"))) if root is not None and root.is_dir() else ()
        )

    def find_reference(self, name: str) -> Path | Refusal:
        """The reference of the candidate at `name` below its folder, or why there is none: the file
        at the same place, else the file with the longest name that the candidate's name begins
        with.
        """
        if self.root is None or not self.root.is_dir():
            return self.root or Refusal(
                f"it defines no {', no '.join(NAMES)}, and no --reference says where those are"
            )
        same_path = self.root / name
        # The place first: it is exact, while a name may fit several files.
        if same_path in self.files:
            return same_path
        stem = Path(name).stem
        matching = [
            file
            for file in self.files
            # The separator belongs to it: "1_matmul" must not match "10_matmul_large".
            if stem == file.stem or stem.startswith((f"{file.stem}_", f"{file.stem}."))
        ]
        # The longest name is the most specific: "1_softmax_backward_v2" fits "1_softmax" too.
        longest = max((len(file.stem) for file in matching), default=0)
        longest_matches = [file for file in matching if len(file.stem) == longest]
        # Two equally good references are an error for the user to settle: a guess could judge the
        # candidate against the wrong one.
        if len(longest_matches) == 1:
            return longest_matches[0]
        problem = (
            f"{len(longest_matches)} references fit its name, such as {longest_matches[0]}"
            if longest_matches
            else "no reference has its name"
        )
        return Refusal(f"{problem}; expected {same_path}")


def _read_pair(
    file: Path, name: str, reference_files: _ReferenceFiles
) -> PublishedTask | UnreadableTask:
    if _CANDIDATE not in (names := _list_top_level_names(file)):
        return UnreadableTask(
            f"it defines no {_CANDIDATE} at its top level, or is no Python", str(file)
        )
    reference = (
        file
        if reference_files.root is None and set(NAMES) <= names
        else reference_files.find_reference(name)
    )
    if isinstance(reference, Refusal):
        return UnreadableTask(reference.reason, str(file))
    try:
        return PublishedTask(
            str(file),
            name.removesuffix(".py"),
            _read_source(reference),
            _read_source(file),
            labels={"reference": str(reference)},
        )
    except OSError as error:
        return UnreadableTask(f"{type(error).__name__}: {error}", str(file))


def _list_top_level_names(file: Path) -> set[str]:
    """Names bound at the top of a file; none for one that cannot be read or is not Python."""
    try:
        # Syntax only: nothing of a published source runs in this process.
        tree = ast.parse(_read_source(file))
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        # ValueError for null bytes, MemoryError and RecursionError for nesting that is too deep for
        # the parser.
        return set()
    names = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    targets = [
        target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    ]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def _read_source(file: Path) -> str:
    """The text of a file. Raises OSError, also for a file too large for a source."""
    # Asked before reading, because a file of any size may lie in the folder.
    size = file.stat().st_size
    if size > _SOURCE_BYTES:
        raise OSError(f"{file} has {size} bytes, a source at most {_SOURCE_BYTES}")
    # Bad bytes are replaced, so that the text still reaches the check that refuses it.
    return file.read_text(encoding="utf-8", errors="replace")
