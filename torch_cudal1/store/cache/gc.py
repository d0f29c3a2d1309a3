"""Folders of a cache that nothing leads to any more: imported bundles that later ones replace, Hub
commits that no pin names, and kernels compiled by other versions than those installed here.

An import is replaced when later ones have each of its files: at the same path, made for the same
device and versions, and signed by at least the same keys. A commit is kept while a pin of its
repository names it, while it is the setting `hub` itself, and while a pin there cannot be read.
Two users are unknown here: a process whose setting names a commit directly, which makes no pin, and
an installation of other versions that shares the cache, which compiles its kernels again.

Only whole folders of this package are deleted, each by a rename first: a process that is killed
meanwhile leaves a name that the next purge removes. A running process keeps what it has loaded; a
process that is writing makes the folder anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Entry
from torch_cudal1.store.bundle.imported import IMPORT_LOCK, list_imported_bundles, list_interrupted
from torch_cudal1.store.cache.build_files import build_folder, name_versions
from torch_cudal1.store.cache.decision_record import open_record
from torch_cudal1.store.cache.entry_file import open_entry
from torch_cudal1.store.cache.files import hold_lock, iter_files, read_file, size_of
from torch_cudal1.store.cache.inventory import decode_file
from torch_cudal1.store.hub.hub_layout import PULL_LOCK

__all__ = ["UnusedFolder", "find_build_folders", "find_folder", "find_unused", "remove_folder"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Neither a bundle's digest nor a commit starts so: no look-up reads a folder under this name.
_LEAVING = ".purged-"
_PURGE_LOCK = ".purge.lock"
_LIMIT_BYTES = 4 << 30
_PIN_LIMIT_BYTES = 1 << 16
# A file's path, what it is made for, who signed it.
_Facts = tuple[str, str, frozenset[str]]


@dataclass(frozen=True)
class UnusedFolder:
    """A folder that may go, and why. `lock`: the file to hold meanwhile, so that no process is
    filling it.
    """

    path: Path
    why: str
    size_bytes: int
    lock: Path


def find_unused(cache_dir: Path, hub: str = "") -> Iterator[UnusedFolder]:
    """Every such folder of the cache; `hub` is the setting of that name."""
    yield from _find_replaced_imports(cache_dir)
    yield from _find_unpinned_commits(cache_dir / "hub", hub)
    # Kernels of the installed versions stay: a search here would have to compile them again.
    yield from (
        folder for folder in find_build_folders(cache_dir) if folder.path.name != name_versions()
    )


def find_build_folders(cache_dir: Path) -> Iterator[UnusedFolder]:
    """Every folder of compiled kernels, of the versions installed here too."""
    home = build_folder(cache_dir)
    leftovers = _list_leftovers(home)
    for folder in (
        *leftovers,
        *(folder for folder in _list_subfolders(home) if folder not in leftovers),
    ):
        why = (
            "kernels compiled here"
            if folder.name == name_versions()
            else "kernels that other versions compiled"
        )
        yield UnusedFolder(
            folder,
            "a purge was killed" if folder in leftovers else why,
            _size(folder),
            home / _PURGE_LOCK,
        )


def find_folder(folder: Path, why: str) -> Iterator[UnusedFolder]:
    """A folder of this package, if it is there, and what a killed purge left of it."""
    # The parent is listed, because a link or a file in the folder's place is not this package's.
    for path in _list_subfolders(folder.parent):
        if path.name in (folder.name, _LEAVING + folder.name):
            yield UnusedFolder(
                path,
                why if path.name == folder.name else "a purge was killed",
                _size(path),
                folder.parent / _PURGE_LOCK,
            )


def remove_folder(folder: UnusedFolder) -> Refusal | None:
    """Delete the folder, or say why it stays."""
    # One second: an import or a pull may hold the lock for minutes, and the purge then names it.
    with hold_lock(folder.lock, 1.0) as state:
        if not state.held:
            reason = f"{folder.lock} cannot be held ({state.reason})"
            return Refusal(f"another process may be at work there: {reason}")
        # Renamed first: a process that is killed meanwhile leaves a name that the next purge
        # removes.
        leaving = folder.path.with_name(_LEAVING + folder.path.name.removeprefix(_LEAVING))
        try:
            os.replace(folder.path, leaving)
            shutil.rmtree(leaving)
        except FileNotFoundError:
            # Another purge was first.
            return None
        except OSError as error:
            return Refusal(f"{type(error).__name__}: {error}")
    return None


def _find_replaced_imports(cache_dir: Path) -> Iterator[UnusedFolder]:
    """The bundles that later imports replace, and the folders that killed imports and purges
    left.
    """
    home = cache_dir / "imported"
    lock = home / IMPORT_LOCK
    for folder in (*list_interrupted(cache_dir), *_list_leftovers(home)):
        yield UnusedFolder(folder, "an import or a purge was killed", _size(folder), lock)
    later: dict[tuple[str, str], list[frozenset[str]]] = {}
    for bundle in list_imported_bundles(cache_dir):
        facts = list(_iter_file_facts(bundle))
        # Signers are compared too: an unsigned copy must not replace a signed file, which is
        # trusted where the copy is not. The first bundle is the latest, and nothing replaces it.
        if later and all(
            any(signers <= later_signers for later_signers in later.get((path, target), ()))
            for path, target, signers in facts
        ):
            yield UnusedFolder(bundle, "later imports have all that is in it", _size(bundle), lock)
            continue
        for path, target, signers in facts:
            later.setdefault((path, target), []).append(signers)


def _iter_file_facts(bundle: Path) -> Iterator[_Facts]:
    """The usable files of an import. One that cannot be read is of no use."""
    for path in (*iter_files(bundle, ".safetensors"), *iter_files(bundle, ".json")):
        # Without the layer.
        relative_path = path.relative_to(bundle).as_posix().partition("/")[2]
        # Decoded as a look-up would: a damaged file in a later import must not replace a whole one.
        data = read_file(path, _LIMIT_BYTES)
        file = data if isinstance(data, Refusal) else decode_file(data, relative_path, path)
        if isinstance(file, Refusal) or isinstance(data, Refusal):
            continue
        opened = (
            open_record(data, tuple(relative_path.split("/")[2:]))
            if file.cache_path.is_record
            else open_entry(data)
        )
        signers = (
            frozenset()
            if isinstance(opened, Refusal)
            else frozenset(signature.key for signature in opened.signatures)
        )
        yield (
            relative_path,
            # All fields of the target: an entry for another torch or driver is stale here, and so
            # replaces nothing.
            repr(file.content.target) if isinstance(file.content, Entry) else file.made_for,
            signers,
        )


def _find_unpinned_commits(home: Path, hub: str) -> Iterator[UnusedFolder]:
    name, _, revision = hub.partition("@")
    for repository in (repo for host in _list_subfolders(home) for repo in _list_subfolders(host)):
        lock = repository / PULL_LOCK
        # Before the pins are read: what a killed purge left may go whatever they name.
        for folder in _list_leftovers(repository):
            yield UnusedFolder(folder, "a purge was killed", _size(folder), lock)
        pinned = _read_pinned_commits(repository)
        if pinned is None:
            # A pin that cannot be read may name any of them.
            continue
        # A setting `hub = name@commit` makes no pin file, and its commit is in use all the same.
        in_use = pinned | ({revision} if repository.name == name.replace("/", "--") else set())
        for commit in _list_subfolders(repository):
            # Folders of other names ("pins") are not commits.
            if _COMMIT.fullmatch(commit.name) and commit.name not in in_use:
                yield UnusedFolder(
                    commit, "no pin of its repository names this commit", _size(commit), lock
                )


def _read_pinned_commits(repository: Path) -> set[str] | None:
    """The commits that the pins of a repository name; None where one cannot be read."""
    commits: set[str] = set()
    for path in iter_files(repository / "pins", ".json"):
        data = read_file(path, _PIN_LIMIT_BYTES)
        try:
            commits.add(str(json.loads(b"" if isinstance(data, Refusal) else data)["commit"]))
        except (ValueError, TypeError, LookupError, RecursionError):
            return None
    return commits


def _list_leftovers(folder: Path) -> list[Path]:
    return [path for path in _list_subfolders(folder) if path.name.startswith(_LEAVING)]


def _list_subfolders(folder: Path) -> list[Path]:
    """Real folders; links are not followed, and what is not there has none."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def _size(folder: Path) -> int:
    return sum(map(size_of, iter_files(folder, "")))
