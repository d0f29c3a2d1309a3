"""`cudal1 push`: the entries of the writable cache into a Hub repository, in one commit with the
index that names them.

The commit names its parent: where another push came first, the Hub refuses it, and the commit is
built again on top of the new head, so no index loses a row of another push. Only files that decode,
and lie where they belong, are offered; a file that changes while it is read is left out. An entry
of the repository that was made later than the local entry is kept. A push deletes no entry.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Entry, Target
from torch_cudal1.store.cache.files import read_file
from torch_cudal1.store.cache.inventory import CacheFile, Inventory
from torch_cudal1.store.cache.local_cache import BrokenFile
from torch_cudal1.store.hub.hub_client import Client, HubFailure, Repo
from torch_cudal1.store.hub.hub_layout import (
    ROOT_INDEX,
    FileListing,
    Kind,
    Root,
    Shard,
    TargetIndex,
    repository_file,
    shard_file,
    target_id,
    target_index_file,
)
from torch_cudal1.store.hub.hub_mirror import CircuitBreaker, Mirror

__all__ = ["Offer", "PushReport", "list_offers", "push"]

_ATTEMPTS = 10
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


@dataclass(frozen=True)
class Offer:
    """A file to be pushed, and under which target and contract."""

    kind: Kind
    key: str
    target: Target
    contract: str
    file: CacheFile

    @property
    def listed(self) -> FileListing:
        """Its row in the index."""
        content = self.file.content
        return FileListing(
            self.file.sha256,
            self.file.size_bytes,
            content.created if isinstance(content, Entry) else "",
        )


@dataclass(frozen=True)
class PushReport:
    """What a push did. `commit` is the branch's commit now; `kept` entries of the repository are
    newer than the local ones.
    """

    commit: str
    entries: int = 0
    records: int = 0
    unchanged: int = 0
    kept: int = 0
    left_out: tuple[BrokenFile, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For `--json`, whose key for decision records is "aliases", as their folder is named."""
        return {
            "aliases" if name == "records" else name: value for name, value in vars(self).items()
        }


@dataclass
class _CommitDraft:
    """One commit in the making."""

    files: dict[str, bytes] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    report: PushReport = PushReport("")
    targets: dict[str, tuple[Target, FileListing]] = field(default_factory=dict)

    def count(self, **more: int) -> None:
        self.report = replace(
            self.report,
            **{name: getattr(self.report, name) + number for name, number in more.items()},
        )


def list_offers(inventory: Inventory, families: Collection[str] | None = None) -> tuple[Offer, ...]:
    """Every entry by its exact target, and the decision records all of whose entries are of one
    target.
    """
    offers: list[Offer] = []
    by_target: dict[Target, list[CacheFile]] = {}
    for file in inventory.select(families=families).entries:
        if isinstance(file.content, Entry):
            by_target.setdefault(file.content.target, []).append(file)
    for target, entries in by_target.items():
        offers += [
            Offer("entry", file.cache_path.name, target, file.cache_path.contract, file)
            for file in entries
        ]
        keys = {file.cache_path.name for file in entries}
        records = (
            Inventory(tuple(entries), inventory.records, ()).select(keys, [target.family]).records
        )
        offers += [
            Offer("alias", file.cache_path.name, target, file.cache_path.contract, file)
            for file in records
        ]
    return tuple(offers)


def push(
    client: Client, repo: Repo, offers: Sequence[Offer], *, message: str
) -> PushReport | HubFailure:
    """Bring `offers` to the branch of `repo`; again on top of what is committed meanwhile, and once
    after a lost answer.
    """
    answer = HubFailure(f"{repo}: no attempt was made", "overtaken")
    # The report of a commit whose answer was lost: the Hub may have made it all the same. If the
    # next attempt finds nothing left to send, that commit arrived.
    unconfirmed: PushReport | None = None
    for attempt in range(_ATTEMPTS):
        head = client.commit_of(repo)
        if isinstance(head, HubFailure):
            return head
        # A mirror of its own: what a push reads of the branch's head must not look like a pulled
        # commit.
        with tempfile.TemporaryDirectory(prefix="cudal1-push-") as folder:
            change = _merge(
                Mirror(Repo(repo.name, head), client, Path(folder) / head, CircuitBreaker()), offers
            )
        if isinstance(change, HubFailure):
            return change
        if not change.files:
            return replace(unconfirmed or change.report, commit=head)
        # The parent makes the commit conditional: the Hub refuses it where the branch moved on.
        commit = client.write(repo, change.files, change.deleted, parent=head, message=message)
        if not isinstance(commit, HubFailure):
            return replace(change.report, commit=commit)
        answer = commit
        if commit.kind == "unreachable" and unconfirmed is None:
            unconfirmed = change.report
        elif commit.kind == "unreachable":
            # The second lost answer: nothing tells whether either commit was made.
            return HubFailure(
                f"{commit.reason}; it may have arrived: push again, what is there is not sent "
                f"twice",
                commit.kind,
            )
        elif commit.kind != "overtaken":
            break
        # Random pauses, so that machines that push at once do not collide again.
        time.sleep(random.uniform(0, min(_LONGEST_PAUSE_S, _PAUSE_S * 2**attempt)))
    return answer


def _merge(mirror: Mirror, offers: Sequence[Offer]) -> _CommitDraft | HubFailure:
    """The files of a commit on top of `mirror`'s: the offers, and every index that changes with
    them.
    """
    root = mirror.index()
    if isinstance(root, HubFailure):
        return root
    change = _CommitDraft(targets=dict(root.targets))
    named = sorted(((target_id(offer.target), offer) for offer in offers), key=lambda pair: pair[0])
    for name, group in groupby(named, key=lambda pair: pair[0]):
        failed = _merge_target(mirror, name, [offer for _, offer in group], change)
        if failed is not None:
            return failed
    # The root index names the others by digest, so it is written last.
    if change.files:
        change.files[ROOT_INDEX] = Root(change.targets).write()
    return change


def _merge_target(
    mirror: Mirror, name: str, offers: Sequence[Offer], change: _CommitDraft
) -> HubFailure | None:
    listed = change.targets.get(name)
    index = TargetIndex() if listed is None else mirror.read_target_index(name, listed[1])
    # An index that cannot be read is never replaced: the rows in it would be lost.
    if isinstance(index, HubFailure):
        return index
    shards = {contract: dict(rows) for contract, rows in index.shards.items()}
    located_offers = sorted(
        (
            (offer.contract, index.find_shard_prefix(offer.contract, offer.key) or "", offer)
            for offer in offers
        ),
        key=lambda p: p[:2],
    )
    for (contract, prefix), group in groupby(located_offers, key=lambda located: located[:2]):
        listed_shard = shards.get(contract, {}).get(prefix)
        shard = (
            Shard()
            if listed_shard is None
            else mirror.read_shard(name, contract, prefix, listed_shard)
        )
        if isinstance(shard, HubFailure):
            return shard
        merged = _merge_shard(shard, [offer for _, _, offer in group], change)
        # No commit where nothing changed: pushing twice sends nothing twice.
        if merged == shard:
            continue
        parts = merged.split(prefix)
        # The shard was split. Its file would be found by no look-up, and its rows go on in the
        # parts.
        if listed_shard is not None and prefix not in parts:
            change.deleted.append(shard_file(name, contract, prefix))
        shards[contract] = {
            p: row for p, row in shards.get(contract, {}).items() if p != prefix
        } | {
            p: _add_file(change, shard_file(name, contract, p), part.write())
            for p, part in parts.items()
        }
    if shards != index.shards:
        data = TargetIndex(shards).write()
        change.targets[name] = (offers[0].target, _add_file(change, target_index_file(name), data))
    return None


def _merge_shard(shard: Shard, offers: Sequence[Offer], change: _CommitDraft) -> Shard:
    rows: Mapping[Kind, dict[str, FileListing]] = {
        "entry": dict(shard.entries),
        "alias": dict(shard.records),
    }
    for offer in offers:
        remote, local = rows[offer.kind].get(offer.key), offer.listed
        if remote is not None and remote.sha256 == local.sha256:
            change.count(unchanged=1)
        elif remote is not None and _is_later(remote, local):
            change.count(kept=1)
        elif isinstance(data := _reread(offer), BrokenFile):
            # Read again at the last moment: a search may have replaced the file since the
            # inventory.
            change.report = replace(change.report, left_out=(*change.report.left_out, data))
        else:
            rows[offer.kind][offer.key] = _add_file(
                change,
                repository_file(offer.kind, offer.key, offer.target, offer.contract),
                data,
                local,
            )
            change.count(**{"entries" if offer.kind == "entry" else "records": 1})
    return Shard(rows["entry"], rows["alias"])


def _add_file(
    change: _CommitDraft, path: str, data: bytes, listed: FileListing | None = None
) -> FileListing:
    change.files[path] = data
    return listed or FileListing(hashlib.sha256(data).hexdigest(), len(data))


def _reread(offer: Offer) -> bytes | BrokenFile:
    """The bytes that were checked, or why they are not pushed: gone or changed since, or no reader
    would take the row of them.
    """
    try:
        # With the reader's own rule: one row that no reader takes would make the whole shard
        # unreadable.
        FileListing.from_json(offer.listed.to_json())
    except ValueError as error:
        return BrokenFile(offer.file.path, f"an index cannot list it: {error}")
    data = read_file(offer.file.path, offer.file.size_bytes)
    if isinstance(data, Refusal):
        return BrokenFile(offer.file.path, data.reason)
    is_same = hashlib.sha256(data).hexdigest() == offer.file.sha256
    return (
        data
        if is_same
        else BrokenFile(offer.file.path, "it changed while it was pushed; push again")
    )


def _is_later(remote: FileListing, local: FileListing) -> bool:
    """Whether the remote entry was made after the local one. A time that is still to come is a
    clock gone wrong, and counts for nothing.
    """
    try:
        remote_time, local_time = (
            datetime.fromisoformat(remote.created),
            datetime.fromisoformat(local.created),
        )
        return local_time < remote_time <= datetime.now(UTC)
    except (ValueError, TypeError):
        # The text is no time, or a time without a zone, which compares with none that has one.
        return False
