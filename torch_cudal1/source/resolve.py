"""Asks sources for a region's entry, in order, and keeps every reason for a miss.

A source is anything with a name and one method, `find`: the local cache, a shared folder, the Hub. A source says "no" with a
`Miss`, so nothing is caught here. It judges nothing: a hit that is stale says why, and the pipeline re-validates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch_cudal1.records import Contract, Entry, Miss, Region, Target

__all__ = ["Hit", "Resolved", "Source", "SourceMiss", "resolve"]


@dataclass(frozen=True)
class Hit:
    """An entry for the region, where it lies, and why it must be re-validated before use (None: judged on a machine like this).

    `vouched_by`: who answers for it (`source.trust`). "" for nobody: then `stale` says why, and it must not be run as it is.
    `digest`: of the whole entry.
    """

    entry: Entry
    where: str
    stale: str | None = None
    vouched_by: str = ""
    digest: str = ""


@dataclass(frozen=True)
class SourceMiss:
    """Which source had nothing, and why."""

    source: str
    reason: str


@dataclass(frozen=True)
class Resolved:
    """What the sources said: the first hit, if any, and the misses of the sources asked before it."""

    hit: Hit | None
    misses: tuple[SourceMiss, ...]


class Source(Protocol):
    """Something that may know an entry for a region."""

    @property
    def name(self) -> str:
        """For reports: "local cache", "hub"."""

    def find(self, region: Region, target: Target, contract: Contract) -> Hit | Miss:
        """The entry for `region` on `target`'s family under `contract`, or why there is none. Raises nothing."""


def resolve(region: Region, sources: Sequence[Source], target: Target, contract: Contract) -> Resolved:
    """The first hit of `sources`, which are asked one after the other: a later one is not touched once an earlier one answered."""
    misses: list[SourceMiss] = []
    for source in sources:
        found = source.find(region, target, contract)
        if isinstance(found, Hit):
            return Resolved(found, tuple(misses))
        misses.append(SourceMiss(source.name, found.reason))
    return Resolved(None, tuple(misses))
