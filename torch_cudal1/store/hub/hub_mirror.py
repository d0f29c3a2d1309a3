"""The part of a Hub repository that this machine has, at one commit, file by file as they were
needed.

    <cache_dir>/hub/<host>/<owner>--<name>/<commit>/...      the repository's own layout (`store.hub.hub_layout`)

A file is taken over only after its digest was compared with the index that names it, each index
with the one above it, and an entry must decode (`store.cache.entry_file`: its own digests, the
Program's rules) and claim the very path it was listed under. What is on the disk is not asked for
again, so a process without network finds all that an earlier process needed. Refused files are
remembered, and a circuit breaker stops requests to a Hub that did not answer: many regions cost one
waiting time. `store.cache.local_cache` reads the entries.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torch_cudal1.core import telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Contract, Target
from torch_cudal1.store.cache.decision_record import decode_record
from torch_cudal1.store.cache.entry_file import decode_entry
from torch_cudal1.store.cache.files import read_file, write_file
from torch_cudal1.store.hub.hub_client import Client, HubFailure, Repo
from torch_cudal1.store.hub.hub_layout import (
    INDEX_LIMIT_BYTES,
    KIND_LABEL,
    ROOT_INDEX,
    FileListing,
    Kind,
    Root,
    Shard,
    TargetIndex,
    repository_file,
    shard_file,
    target_folder,
    target_id,
    target_index_file,
)

__all__ = ["CircuitBreaker", "Kind", "Mirror"]

_OPEN_S = 60.0
_T = TypeVar("_T", Root, TargetIndex, Shard)


@dataclass
class CircuitBreaker:
    """Stops requests to a Hub that does not answer.

    It is open (no request is made) for the rest of the process where there is no network, or once
    the Hub has cost too much time; for a while after a request without an answer.
    """

    # The reason where no request is ever made, such as a setting; "" elsewhere.
    disabled: str = ""
    # How long all requests of the process may wait together.
    budget_s: float = math.inf
    _spent_s: float = 0.0
    _open_until: float = 0.0
    _reason: str = ""

    def check(self) -> HubFailure | None:
        """Why no request is made now; None when one may be."""
        if self.disabled:
            return HubFailure(self.disabled, "unreachable")
        # A slow Hub answers every request in time and still delays a start without end.
        if self._spent_s >= self.budget_s:
            reason = f"this process has waited {self._spent_s:.0f} s for the Hub; `cudal1 pull` fetches everything ahead of time"
            return HubFailure(reason, "unreachable")
        return (
            HubFailure(f"not asked again yet: {self._reason}", "unreachable")
            if time.monotonic() < self._open_until
            else None
        )

    def record_answer(self, answer: object, waited_s: float) -> None:
        """Add what an answer cost, and open for a while where none came."""
        self._spent_s += waited_s
        if isinstance(answer, HubFailure) and answer.is_passing:
            # Many regions are looked up in a row: one time-out is to be paid, not one for each.
            self._open_until, self._reason = time.monotonic() + _OPEN_S, answer.reason


@dataclass
class Mirror:
    """One repository at one commit: `repo.revision` is the commit, `root` its folder."""

    repo: Repo
    client: Client
    root: Path
    breaker: CircuitBreaker
    _parsed: dict[str, object] = field(default_factory=dict)
    _refused: dict[str, HubFailure] = field(default_factory=dict)

    def index(self) -> Root | HubFailure:
        """The targets. A repository without an index has none."""
        root_index = self._parse_index(ROOT_INDEX, None, Root.read)
        return (
            Root()
            if isinstance(root_index, HubFailure) and root_index.kind == "absent"
            else root_index
        )

    def read_target_index(self, name: str, listed: FileListing) -> TargetIndex | HubFailure:
        """The shards of a target of `index()`."""
        return self._parse_index(target_index_file(name), listed, TargetIndex.read)

    def read_shard(
        self, name: str, contract: str, prefix: str, listed: FileListing
    ) -> Shard | HubFailure:
        """A shard of `read_target_index()`."""
        return self._parse_index(shard_file(name, contract, prefix), listed, Shard.read)

    def bring(
        self, kind: Kind, key: str, target: Target, contract: Contract, target_index: FileListing
    ) -> Path | HubFailure:
        """The file of `key` on this disk, if the repository has one for this very target and
        contract.
        """
        name = target_id(target)
        shards = self.read_target_index(name, target_index)
        if isinstance(shards, HubFailure):
            return shards
        prefix = shards.find_shard_prefix(contract.digest, key)
        shard = (
            Shard()
            if prefix is None
            else self.read_shard(
                name, contract.digest, prefix, shards.shards[contract.digest][prefix]
            )
        )
        if isinstance(shard, HubFailure):
            return shard
        listed = (shard.entries if kind == "entry" else shard.records).get(key)
        if listed is None:
            return HubFailure(f"{self.repo}: no {KIND_LABEL[kind]} {key}", "absent")
        return self.fetch_file(kind, key, target, contract.digest, listed)

    def folder(self, name: str) -> Path:
        """The ordinary cache folder of a target."""
        return self.root / target_folder(name)

    def fetch_file(
        self, kind: Kind, key: str, target: Target, contract: str, listed: FileListing
    ) -> Path | HubFailure:
        """The file of a listed entry or decision record, on this disk: whole, and of this very key,
        target and contract.
        """
        path, rule = (
            repository_file(kind, key, target, contract),
            {"entry": _check_entry, "alias": _check_record}[kind],
        )
        # Compared with the digest at every use, so a file that was damaged on the disk is fetched
        # again.
        local = read_file(self.root / path, listed.size_bytes)
        if isinstance(local, bytes) and _matches_listing(local, listed):
            return self.root / path
        data = self._copy_from_other_commit(path, listed) or self._download(
            path, listed, lambda data: rule(data, key, target, contract)
        )
        if isinstance(data, HubFailure):
            return data
        stored = write_file(self.root / path, data)
        if isinstance(stored, Refusal):
            return self._remember_refusal(
                path, HubFailure(f"{self.repo}: {path} came whole, but {stored.reason}", "refused")
            )
        return stored.path

    def _parse_index(
        self, path: str, listed: FileListing | None, parse: Callable[[bytes], _T | Refusal]
    ) -> _T | HubFailure:
        parsed = self._parsed.get(path)
        if parsed is not None:
            return parsed  # type: ignore[return-value]  # only `parse` of this path ever put it there
        data = self._read_or_download(path, listed, lambda data: _keep_refusal(parse(data)))
        if isinstance(data, HubFailure):
            return data
        index = parse(data)
        # A download was parsed by the check already: only a file that was damaged on this disk
        # since gets here.
        if isinstance(index, Refusal):
            return HubFailure(f"{self.root / path}: {index.reason}", "refused")
        # Without a limit in time: the mirror is of one commit, and a commit never changes.
        self._parsed[path] = index
        return index

    def _read_or_download(
        self, path: str, listed: FileListing | None, check: Callable[[bytes], Refusal | None]
    ) -> bytes | HubFailure:
        local = read_file(self.root / path, listed.size_bytes if listed else INDEX_LIMIT_BYTES)
        if (
            not isinstance(local, Refusal)
            and (listed is None or _matches_listing(local, listed))
            # The root index has no digest above it, so the check is what finds it damaged.
            and check(local) is None
        ):
            return local
        data = self._copy_from_other_commit(path, listed) or self._download(path, listed, check)
        if not isinstance(data, HubFailure):
            # A disk that refuses costs the next process a request, not this one its answer.
            write_file(self.root / path, data)
        return data

    def _download(
        self, path: str, listed: FileListing | None, check: Callable[[bytes], Refusal | None]
    ) -> bytes | HubFailure:
        """The file from the Hub, if a request may be made and the file breaks no rule."""
        # What was refused before costs no request, also where the breaker is closed.
        if (refused := self._refused.get(path) or self.breaker.check()) is not None:
            return refused
        started = time.monotonic()
        data = self.client.read(self.repo, path, listed, INDEX_LIMIT_BYTES)
        self.breaker.record_answer(data, time.monotonic() - started)
        if isinstance(data, HubFailure):
            # The index and the repository disagree. "absent" would be taken for the ordinary miss.
            if data.kind == "absent" and listed is not None:
                data = HubFailure(f"{data.reason}, which the index names", "refused")
            return data if data.is_passing else self._remember_refusal(path, data)
        telemetry.record(
            "hub", "fetched", file=path, commit=self.repo.revision, size_bytes=len(data)
        )
        refusal = check(data)
        if refusal is None:
            return data
        return self._remember_refusal(
            path, HubFailure(f"{self.repo}: {path}: {refusal}", "refused")
        )

    def _remember_refusal(self, path: str, refusal: HubFailure) -> HubFailure:
        """Keep `refusal` for the rest of the process."""
        # A commit never changes, so a file that is refused once is refused for ever.
        self._refused[path] = refusal
        if refusal.kind == "refused":
            telemetry.record(
                "hub", "refused", file=path, commit=self.repo.revision, reason=refusal.reason
            )
        return refusal

    def _copy_from_other_commit(self, path: str, listed: FileListing | None) -> bytes | None:
        """The same file from another commit that is on this disk; its digest is the one that was
        checked then.
        """
        if listed is None:
            return None
        for folder in sorted(self.root.parent.glob("*/" + path)):
            data = read_file(folder, listed.size_bytes)
            if isinstance(data, bytes) and _matches_listing(data, listed):
                return data
        return None


def _matches_listing(data: bytes, listed: FileListing) -> bool:
    return len(data) == listed.size_bytes and hashlib.sha256(data).hexdigest() == listed.sha256


def _keep_refusal(parsed: object) -> Refusal | None:
    return parsed if isinstance(parsed, Refusal) else None


def _check_entry(data: bytes, key: str, target: Target, contract: str) -> Refusal | None:
    """Which rule an entry's file breaks."""
    entry = decode_entry(data)
    if isinstance(entry, Refusal):
        return entry
    # A whole entry listed under another target would be believed to be judged there.
    if entry.target != target:
        claimed = f"{entry.target.sku!r} ({entry.target.family}, torch {entry.target.torch})"
        return Refusal(f"it claims the target {claimed}")
    if (entry.region_key, entry.contract.digest) == (key, contract):
        return None
    return Refusal(
        f"it holds the entry of {entry.region_key} under contract {entry.contract.digest}"
    )


def _check_record(data: bytes, name: str, target: Target, contract: str) -> Refusal | None:
    return _keep_refusal(decode_record(data, (target.family, contract, name[:2], f"{name}.json")))
