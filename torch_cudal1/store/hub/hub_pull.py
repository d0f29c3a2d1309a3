"""`cudal1 pull`: every entry of a Hub repository for some targets, onto this disk, and the
revision's pin moved to that commit.

A file that is on the disk already, from this commit or an earlier one, is not downloaded again. A
refused file does not stop the rest. A Hub that stops answering does: then the pin stays where it
was, and the next pull goes on from the files that came. It judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Target
from torch_cudal1.store.cache.files import hold_lock
from torch_cudal1.store.hub.hub_client import HubFailure
from torch_cudal1.store.hub.hub_layout import KIND_LABEL, PULL_LOCK, FileListing, Kind
from torch_cudal1.store.hub.hub_mirror import Mirror
from torch_cudal1.store.hub.hub_source import Hub

__all__ = ["PullReport", "pull"]

_AT_ONCE = 4
_LOCK_S = 600.0
Progress: TypeAlias = Callable[[str, float | None], None]


@dataclass(frozen=True)
class PullReport:
    """What a pull did. `folders` are ordinary cache folders, one a target; `complete`: every file
    came or was refused by a rule.
    """

    commit: str
    folders: tuple[Path, ...] = ()
    entries: int = 0
    records: int = 0
    refused: tuple[str, ...] = ()
    complete: bool = True
    # Why the pin was not moved.
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """For `--json`, whose key for decision records is "aliases", as their folder is named."""
        return {
            "aliases" if name == "records" else name: value for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class _RemoteFile:
    kind: Kind
    key: str
    target: Target
    contract: str
    listed: FileListing


def pull(hub: Hub, families: Collection[str] | None, progress: Progress) -> PullReport | HubFailure:
    """Bring every file of these families' targets (None: of all) here, and pin the commit. A
    HubFailure where the commit or the index could not be read.
    """
    # Until the commit is pinned, a purge would find that no pin names it and delete its files.
    with hold_lock(hub.folder / PULL_LOCK, _LOCK_S):
        return _pull_locked(hub, families, progress)


def _pull_locked(
    hub: Hub, families: Collection[str] | None, progress: Progress
) -> PullReport | HubFailure:
    mirror = hub.open_latest()
    if isinstance(mirror, HubFailure):
        return mirror
    progress(f"reading the index of {mirror.repo}", None)
    root = mirror.index()
    if isinstance(root, HubFailure):
        return root
    names = [
        name
        for name, (target, _) in root.targets.items()
        if families is None or target.family in families
    ]
    # Collected and not raised: a file that is refused does not stop the rest.
    problems: list[HubFailure] = []
    files = [
        file
        for name in names
        for file in _list_files(mirror, (name, *root.targets[name]), problems)
    ]
    pulled_files: list[_RemoteFile] = []
    # `map` keeps the order of `files`, which `zip` pairs with the answers.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for i, (file, path) in enumerate(
            zip(files, pool.map(lambda file: _fetch_file(mirror, file), files), strict=True)
        ):
            progress(f"{KIND_LABEL[file.kind]} {file.key[:12]}", (i + 1) / len(files))
            if isinstance(path, HubFailure):
                problems.append(path)
            else:
                pulled_files.append(file)
    return _record_pin(
        hub,
        mirror,
        problems,
        PullReport(
            mirror.repo.revision,
            tuple(mirror.folder(name) for name in names),
            sum(file.kind == "entry" for file in pulled_files),
            sum(file.kind == "alias" for file in pulled_files),
        ),
    )


def _record_pin(
    hub: Hub, mirror: Mirror, problems: list[HubFailure], pulled: PullReport
) -> PullReport:
    refused = tuple(sorted(problem.reason for problem in problems if not problem.is_passing))
    # A refused file is refused for ever at this commit, so it does not hold the pin back. A file
    # that did not come may come with the next pull.
    missing = [problem.reason for problem in problems if problem.is_passing]
    # The pin stays where it was: a restart must find every file of the commit that it names.
    if missing:
        problem = f"{len(missing)} files did not come, the first: {missing[0]}"
        return PullReport(
            pulled.commit, pulled.folders, pulled.entries, pulled.records, refused, False, problem
        )
    # Last, when all files are on the disk.
    stored = hub.record_pin(mirror)
    problem = f"the pin was not recorded: {stored.reason}" if isinstance(stored, Refusal) else ""
    return PullReport(
        pulled.commit, pulled.folders, pulled.entries, pulled.records, refused, True, problem
    )


def _list_files(
    mirror: Mirror, target_row: tuple[str, Target, FileListing], problems: list[HubFailure]
) -> list[_RemoteFile]:
    """Every file that the shards of a target list; shards that cannot be read are problems."""
    name, target, listed = target_row
    index = mirror.read_target_index(name, listed)
    if isinstance(index, HubFailure):
        problems.append(index)
        return []
    files: list[_RemoteFile] = []
    for contract, shards in index.shards.items():
        for prefix, row in shards.items():
            shard = mirror.read_shard(name, contract, prefix, row)
            if isinstance(shard, HubFailure):
                problems.append(shard)
                continue
            files += [
                _RemoteFile("entry", key, target, contract, listed_file)
                for key, listed_file in shard.entries.items()
            ]
            files += [
                _RemoteFile("alias", key, target, contract, listed_file)
                for key, listed_file in shard.records.items()
            ]
    return files


def _fetch_file(mirror: Mirror, file: _RemoteFile) -> Path | HubFailure:
    return mirror.fetch_file(file.kind, file.key, file.target, file.contract, file.listed)
