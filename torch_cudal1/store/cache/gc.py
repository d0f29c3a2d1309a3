"""Folders of a cache that nothing leads to any more: imported bundles that later ones replace, Hub
commits that no pin names, and kernels compiled by other versions than those installed here.

An import is replaced when later ones have each of its files: at the same place, made for the same
device and versions, and signed by at least the same keys. A commit is kept while a pin of its
repository names it, while it is the setting `hub` itself, and while a pin there cannot be read. Who
gives a commit as the revision in another process makes no pin: that is not known here. Nor is an
installation of other versions that shares the cache: it compiles its kernels again.

Nothing is deleted but whole folders of ours, each by a rename first: a process that is killed
meanwhile leaves a name that the next purge removes. A process that runs keeps what it has loaded;
one that is just writing makes the folder anew.
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

from torch_cudal1.ir.records import Entry, Miss
from torch_cudal1.store.bundle.imported import IMPORT_LOCK, imported_bundles, left_behind
from torch_cudal1.store.cache.build_files import built_home, versions_name
from torch_cudal1.store.cache.decision_record import open_alias
from torch_cudal1.store.cache.entry_file import open_entry
from torch_cudal1.store.cache.files import files_under, hold, read_file, size_of
from torch_cudal1.store.cache.inventory import held_in
from torch_cudal1.store.hub.hub_layout import PULL_LOCK

__all__ = ["Unused", "compiled", "remove", "unused", "whole"]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LEAVING = ".purged-"
_PURGE_LOCK = ".purge.lock"
_LIMIT_BYTES = 4 << 30
_PIN_LIMIT_BYTES = 1 << 16
_Facts = tuple[str, str, frozenset[str]]  # a file's place, what it is made for, who signed it


@dataclass(frozen=True)
class Unused:
    """A folder that may go, and why. `lock`: the file to hold meanwhile, so that nobody is just
    filling it.
    """

    path: Path
    why: str
    size_bytes: int
    lock: Path


def unused(cache_dir: Path, hub: str = "") -> Iterator[Unused]:
    """Every such folder of the cache; `hub` is the setting of that name."""
    yield from _imports(cache_dir)
    yield from _commits(cache_dir / "hub", hub)
    yield from (one for one in compiled(cache_dir) if one.path.name != versions_name())


def compiled(cache_dir: Path) -> Iterator[Unused]:
    """Every folder of compiled kernels, of the versions installed here too."""
    home = built_home(cache_dir)
    left = _leaving(home)
    for folder in (*left, *(one for one in _subfolders(home) if one not in left)):
        why = (
            "kernels compiled here"
            if folder.name == versions_name()
            else "kernels that other versions compiled"
        )
        yield Unused(
            folder,
            "a purge was killed" if folder in left else why,
            _size(folder),
            home / _PURGE_LOCK,
        )


def whole(folder: Path, why: str) -> Iterator[Unused]:
    """A folder of ours as it is, if it is there, and what a killed purge left of it."""
    for one in _subfolders(folder.parent):
        if one.name in (folder.name, _LEAVING + folder.name):
            yield Unused(
                one,
                why if one.name == folder.name else "a purge was killed",
                _size(one),
                folder.parent / _PURGE_LOCK,
            )


def remove(found: Unused) -> str:
    """Delete the folder; why it stays, "" if it is gone."""
    with hold(found.lock, 1.0) as state:
        if not state.held:
            return f"somebody may be at work there: {found.lock} cannot be held ({state.reason})"
        leaving = found.path.with_name(_LEAVING + found.path.name.removeprefix(_LEAVING))
        try:
            os.replace(found.path, leaving)
            shutil.rmtree(leaving)
        except FileNotFoundError:  # another purge was first
            return ""
        except OSError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _imports(cache_dir: Path) -> Iterator[Unused]:
    """Of the bundles, latest first: those that the ones before them replace; and what killed
    imports and purges left.
    """
    home = cache_dir / "imported"
    lock = home / IMPORT_LOCK
    for folder in (*left_behind(cache_dir), *_leaving(home)):
        yield Unused(folder, "an import or a purge was killed", _size(folder), lock)
    later: dict[tuple[str, str], list[frozenset[str]]] = {}
    for bundle in imported_bundles(cache_dir):
        facts = list(_facts(bundle))
        if later and all(
            any(signers <= other for other in later.get((place, made), ()))
            for place, made, signers in facts
        ):
            yield Unused(bundle, "later imports have all that is in it", _size(bundle), lock)
            continue
        for place, made, signers in facts:
            later.setdefault((place, made), []).append(signers)


def _facts(bundle: Path) -> Iterator[_Facts]:
    """The usable files of an import. One that cannot be read serves nobody."""
    for path in (*files_under(bundle, ".safetensors"), *files_under(bundle, ".json")):
        place = path.relative_to(bundle).as_posix().partition("/")[2]  # without the layer
        data = read_file(path, _LIMIT_BYTES)
        held = data if isinstance(data, Miss) else held_in(data, place, path)
        if isinstance(held, Miss) or isinstance(data, Miss):
            continue
        opened = (
            open_alias(data, tuple(place.split("/")[2:]))
            if held.position.is_alias
            else open_entry(data)
        )
        signers = (
            frozenset()
            if isinstance(opened, Miss)
            else frozenset(one.key for one in opened.signatures)
        )
        yield (
            place,
            repr(held.content.target) if isinstance(held.content, Entry) else held.made_for,
            signers,
        )


def _commits(home: Path, hub: str) -> Iterator[Unused]:
    name, _, revision = hub.partition("@")
    for repository in (repo for host in _subfolders(home) for repo in _subfolders(host)):
        lock = repository / PULL_LOCK
        for folder in _leaving(repository):
            yield Unused(folder, "a purge was killed", _size(folder), lock)
        pinned = _pinned(repository)
        if pinned is None:
            continue  # a pin that cannot be read may name any of them
        in_use = pinned | ({revision} if repository.name == name.replace("/", "--") else set())
        for commit in _subfolders(repository):
            if _COMMIT.fullmatch(commit.name) and commit.name not in in_use:
                yield Unused(
                    commit, "no pin of its repository names this commit", _size(commit), lock
                )


def _pinned(repository: Path) -> set[str] | None:
    """The commits that the pins of a repository name; None where one cannot be read."""
    commits: set[str] = set()
    for path in files_under(repository / "pins", ".json"):
        data = read_file(path, _PIN_LIMIT_BYTES)
        try:
            commits.add(str(json.loads(b"" if isinstance(data, Miss) else data)["commit"]))
        except (ValueError, TypeError, LookupError, RecursionError):
            return None
    return commits


def _leaving(folder: Path) -> list[Path]:
    return [one for one in _subfolders(folder) if one.name.startswith(_LEAVING)]


def _subfolders(folder: Path) -> list[Path]:
    """Real folders; links are not followed, and what is not there has none."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        return sorted(Path(one.path) for one in found if one.is_dir(follow_symlinks=False))
    return []


def _size(folder: Path) -> int:
    return sum(map(size_of, files_under(folder, "")))
