"""The part of a Hub repository that this machine has, at one commit, file by file as they were
needed.

    <cache_dir>/hub/<host>/<owner>--<name>/<commit>/...      the repository's own layout (`store.hub.hub_layout`)

A file is taken over only after its digest was compared with the index that names it, each index
with the one above it, and an entry must decode (`store.cache.entry_file`: its own digests, the
Program's rules) and claim the very place it was listed under. What is on the disk is not asked for
again, so a process without network finds all that an earlier one needed. What was refused is
remembered, and a Hub that did not answer is left alone for a while: many regions cost one waiting
time. The entries are read by `store.cache.local_cache`.
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
from torch_cudal1.ir.records import Contract, Miss, Target
from torch_cudal1.store.cache.entry_file import decode_entry
from torch_cudal1.store.cache.files import NotStored, read_file, write_file
from torch_cudal1.store.cache.local_cache import decode_alias
from torch_cudal1.store.hub.hub_client import Client, Repo, Unread
from torch_cudal1.store.hub.hub_layout import (
    INDEX_LIMIT_BYTES,
    ROOT_INDEX,
    Kind,
    Listed,
    Root,
    Shard,
    TargetIndex,
    repository_file,
    shard_file,
    target_folder,
    target_id,
    target_index_file,
)

__all__ = ["Gate", "Kind", "Mirror"]

_LEFT_ALONE_S = 60.0
_T = TypeVar("_T", Root, TargetIndex, Shard)


@dataclass
class Gate:
    """Whether the Hub may be asked.

    Shut for good where there is no network, or once it has cost too much time; for a while after it
    did not answer.
    """

    shut: str = ""  # why, if for good
    budget_s: float = math.inf  # the waiting time of all questions together
    _spent_s: float = 0.0
    _until: float = 0.0
    _reason: str = ""

    def closed(self) -> Unread | None:
        """Why the Hub is not asked now; None when it may be."""
        if self.shut:
            return Unread("unreachable", self.shut)
        if self._spent_s >= self.budget_s:
            reason = f"this process has waited {self._spent_s:.0f} s for the Hub; `cudal1 pull` fetches everything ahead of time"
            return Unread("unreachable", reason)
        return (
            Unread("unreachable", f"not asked again yet: {self._reason}")
            if time.monotonic() < self._until
            else None
        )

    def note(self, answer: object, waited_s: float) -> None:
        """Remember what an answer cost, and one that did not come."""
        self._spent_s += waited_s
        if isinstance(answer, Unread) and answer.is_passing:
            self._until, self._reason = time.monotonic() + _LEFT_ALONE_S, answer.reason


@dataclass
class Mirror:
    """One repository at one commit: `repo.revision` is the commit, `root` its folder."""

    repo: Repo
    client: Client
    root: Path
    gate: Gate
    _parsed: dict[str, object] = field(default_factory=dict)
    _refused: dict[str, Unread] = field(default_factory=dict)

    def index(self) -> Root | Unread:
        """The targets. A repository without an index has none."""
        found = self._index(ROOT_INDEX, None, Root.read)
        return Root() if isinstance(found, Unread) and found.kind == "absent" else found

    def shards(self, name: str, listed: Listed) -> TargetIndex | Unread:
        """The shards of a target of `index()`."""
        return self._index(target_index_file(name), listed, TargetIndex.read)

    def shard(self, name: str, contract: str, prefix: str, listed: Listed) -> Shard | Unread:
        """A shard of `shards()`."""
        return self._index(shard_file(name, contract, prefix), listed, Shard.read)

    def bring(
        self, kind: Kind, key: str, target: Target, contract: Contract, target_index: Listed
    ) -> Path | Unread:
        """The file of `key` on this disk, if the repository has one for this very target and
        contract.
        """
        name = target_id(target)
        shards = self.shards(name, target_index)
        if isinstance(shards, Unread):
            return shards
        prefix = shards.covering(contract.digest, key)
        shard = (
            Shard()
            if prefix is None
            else self.shard(name, contract.digest, prefix, shards.shards[contract.digest][prefix])
        )
        if isinstance(shard, Unread):
            return shard
        listed = (shard.entries if kind == "entry" else shard.aliases).get(key)
        if listed is None:
            return Unread("absent", f"{self.repo}: no {kind} {key}")
        return self.file(kind, key, target, contract.digest, listed)

    def folder(self, name: str) -> Path:
        """The ordinary cache folder of a target."""
        return self.root / target_folder(name)

    def file(
        self, kind: Kind, key: str, target: Target, contract: str, listed: Listed
    ) -> Path | Unread:
        """The file of a listed entry or alias, on this disk: whole, and of this very key, target
        and contract.
        """
        path, check = (
            repository_file(kind, key, target, contract),
            {"entry": _entry_rule, "alias": _alias_rule}[kind],
        )
        held = read_file(self.root / path, listed.size_bytes)
        if isinstance(held, bytes) and _is(held, listed):
            return self.root / path
        data = self._taken_over(path, listed) or self._asked(
            path, listed, lambda data: check(data, key, target, contract)
        )
        if isinstance(data, Unread):
            return data
        stored = write_file(self.root / path, data)
        if isinstance(stored, NotStored):
            return self._remembered(
                path, Unread("refused", f"{self.repo}: {path} came whole, but {stored.reason}")
            )
        return stored.path

    def _index(
        self, path: str, listed: Listed | None, parse: Callable[[bytes], _T | Miss]
    ) -> _T | Unread:
        held = self._parsed.get(path)
        if held is not None:
            return held  # type: ignore[return-value]  # only `parse` of this path ever put it there
        data = self._bytes(
            path,
            listed,
            lambda data: found.reason if isinstance(found := parse(data), Miss) else "",
        )
        found = data if isinstance(data, Unread) else parse(data)
        if isinstance(found, Miss):  # only a file that was damaged on this disk gets here
            return Unread("refused", f"{self.root / path}: {found.reason}")
        if not isinstance(found, Unread):
            self._parsed[path] = found
        return found

    def _bytes(
        self, path: str, listed: Listed | None, rule_broken: Callable[[bytes], str]
    ) -> bytes | Unread:
        local = read_file(self.root / path, listed.size_bytes if listed else INDEX_LIMIT_BYTES)
        if (
            not isinstance(local, Miss)
            and (listed is None or _is(local, listed))
            and not rule_broken(local)
        ):
            return local
        data = self._taken_over(path, listed) or self._asked(path, listed, rule_broken)
        if not isinstance(data, Unread):
            write_file(
                self.root / path, data
            )  # a disk that refuses costs the next process a question, not this one its answer
        return data

    def _asked(
        self, path: str, listed: Listed | None, rule_broken: Callable[[bytes], str]
    ) -> bytes | Unread:
        """The file from the Hub, if it may be asked and what comes breaks no rule."""
        if (refused := self._refused.get(path) or self.gate.closed()) is not None:
            return refused
        started = time.monotonic()
        data = self.client.read(self.repo, path, listed, INDEX_LIMIT_BYTES)
        self.gate.note(data, time.monotonic() - started)
        if isinstance(data, Unread):
            if data.kind == "absent" and listed is not None:
                data = Unread("refused", f"{data.reason}, which the index names")
            return data if data.is_passing else self._remembered(path, data)
        telemetry.record(
            "hub", "fetched", file=path, commit=self.repo.revision, size_bytes=len(data)
        )
        broken = rule_broken(data)
        return (
            self._remembered(path, Unread("refused", f"{self.repo}: {path}: {broken}"))
            if broken
            else data
        )

    def _remembered(self, path: str, refusal: Unread) -> Unread:
        """A file that is refused is so for this commit: a commit never changes."""
        self._refused[path] = refusal
        if refusal.kind == "refused":
            telemetry.record(
                "hub", "refused", file=path, commit=self.repo.revision, reason=refusal.reason
            )
        return refusal

    def _taken_over(self, path: str, listed: Listed | None) -> bytes | None:
        """The same file from another commit that is on this disk; its digest is the one that was
        checked then.
        """
        if listed is None:
            return None
        for folder in sorted(self.root.parent.glob("*/" + path)):
            data = read_file(folder, listed.size_bytes)
            if isinstance(data, bytes) and _is(data, listed):
                return data
        return None


def _is(data: bytes, listed: Listed) -> bool:
    return len(data) == listed.size_bytes and hashlib.sha256(data).hexdigest() == listed.sha256


def _entry_rule(data: bytes, key: str, target: Target, contract: str) -> str:
    """Which rule an entry's file breaks; "" for none."""
    entry = decode_entry(data)
    if isinstance(entry, Miss):
        return entry.reason
    if entry.target != target:
        return f"it claims the target {entry.target.sku!r} ({entry.target.family}, torch {entry.target.torch})"
    same = (entry.region_key, entry.contract.digest) == (key, contract)
    return (
        ""
        if same
        else f"it holds the entry of {entry.region_key} under contract {entry.contract.digest}"
    )


def _alias_rule(data: bytes, name: str, target: Target, contract: str) -> str:
    value = decode_alias(data, (target.family, contract, name[:2], f"{name}.json"))
    return value.reason if isinstance(value, Miss) else ""
