"""`cudal1 pull`: every entry of a Hub repository for some targets, onto this disk, and the
revision's pin moved to that commit.

What is on the disk already, from this commit or an earlier one, is not downloaded again. A file
that is refused does not stop the rest; a Hub that stops answering does, and then the pin stays
where it was: the next pull goes on from what came. It judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch_cudal1.ir.records import Target
from torch_cudal1.store.cache.files import NotStored, hold
from torch_cudal1.store.hub.hub_client import Unread
from torch_cudal1.store.hub.hub_layout import PULL_LOCK, Kind, Listed
from torch_cudal1.store.hub.hub_mirror import Mirror
from torch_cudal1.store.hub.hub_source import Hub

__all__ = ["Pulled", "pull"]

_AT_ONCE = 4
_LOCK_S = 600.0
Progress: TypeAlias = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Pulled:
    """What a pull did. `folders` are ordinary cache folders, one a target; `complete`: every file
    came or was refused by a rule.
    """

    commit: str
    folders: tuple[Path, ...] = ()
    entries: int = 0
    aliases: int = 0
    refused: tuple[str, ...] = ()
    complete: bool = True
    problem: str = ""  # why the pin was not moved


@dataclass(frozen=True)
class _Wanted:
    kind: Kind
    key: str
    target: Target
    contract: str
    listed: Listed


def pull(hub: Hub, families: Collection[str] | None, progress: Progress) -> Pulled | Unread:
    """Bring every file of these families' targets (None: of all) here, and pin the commit. Unread
    where nothing could be asked.
    """
    with hold(
        hub.folder / PULL_LOCK, _LOCK_S
    ):  # until the commit is pinned a purge would find that nothing leads to it
        return _pulled(hub, families, progress)


def _pulled(hub: Hub, families: Collection[str] | None, progress: Progress) -> Pulled | Unread:
    mirror = hub.refreshed()
    if isinstance(mirror, Unread):
        return mirror
    progress(f"reading the index of {mirror.repo}", None)
    root = mirror.index()
    if isinstance(root, Unread):
        return root
    names = [
        name
        for name, (target, _) in root.targets.items()
        if families is None or target.family in families
    ]
    problems: list[Unread] = []
    wanted = [
        one for name in names for one in _listed_in(mirror, (name, *root.targets[name]), problems)
    ]
    came: list[_Wanted] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for i, (one, path) in enumerate(
            zip(wanted, pool.map(lambda one: _bring(mirror, one), wanted), strict=True)
        ):
            progress(f"{one.kind} {one.key[:12]}", (i + 1) / len(wanted))
            if isinstance(path, Unread):
                problems.append(path)
            else:
                came.append(one)
    return _pinned(
        hub,
        mirror,
        problems,
        Pulled(
            mirror.repo.revision,
            tuple(mirror.folder(name) for name in names),
            sum(one.kind == "entry" for one in came),
            sum(one.kind == "alias" for one in came),
        ),
    )


def _pinned(hub: Hub, mirror: Mirror, problems: list[Unread], pulled: Pulled) -> Pulled:
    refused = tuple(sorted(problem.reason for problem in problems if not problem.is_passing))
    missing = [problem.reason for problem in problems if problem.is_passing]
    if missing:
        problem = f"{len(missing)} files did not come, the first: {missing[0]}"
        return Pulled(
            pulled.commit, pulled.folders, pulled.entries, pulled.aliases, refused, False, problem
        )
    stored = hub.record(mirror)
    problem = f"the pin was not recorded: {stored.reason}" if isinstance(stored, NotStored) else ""
    return Pulled(
        pulled.commit, pulled.folders, pulled.entries, pulled.aliases, refused, True, problem
    )


def _listed_in(
    mirror: Mirror, of: tuple[str, Target, Listed], problems: list[Unread]
) -> list[_Wanted]:
    """Every file that the shards of a target list; shards that cannot be read are problems."""
    name, target, listed = of
    index = mirror.shards(name, listed)
    if isinstance(index, Unread):
        problems.append(index)
        return []
    wanted: list[_Wanted] = []
    for contract, shards in index.shards.items():
        for prefix, row in shards.items():
            shard = mirror.shard(name, contract, prefix, row)
            if isinstance(shard, Unread):
                problems.append(shard)
                continue
            wanted += [
                _Wanted("entry", key, target, contract, each) for key, each in shard.entries.items()
            ]
            wanted += [
                _Wanted("alias", key, target, contract, each) for key, each in shard.aliases.items()
            ]
    return wanted


def _bring(mirror: Mirror, one: _Wanted) -> Path | Unread:
    return mirror.file(one.kind, one.key, one.target, one.contract, one.listed)
