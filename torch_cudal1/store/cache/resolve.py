"""Asks sources for a region's entry, in order, and keeps every reason for a miss.

A source has a name and one method, `find`: the local cache, a shared folder, the Hub. A source
without an entry returns a `Refusal`, so this module catches no exception. It judges nothing: a
stale hit says why it is stale, and the pipeline re-validates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.records import Contract, Entry, Region, Target

__all__ = ["Hit", "Resolved", "Source", "SourceMiss", "resolve"]


@dataclass(frozen=True)
class Hit:
    """An entry for the region, where it lies, and why it must be re-validated before use (None:
    judged on a machine like this).

    `vouched_by`: who answers for it (`store.trust.trust_policy`). "" where no trusted key does:
    then `stale` says why, and it must not be run as it is. `digest`: of the whole entry.
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
    """What the sources said: the hit, if any, and the misses of the sources that were asked."""

    hit: Hit | None
    misses: tuple[SourceMiss, ...]

    @property
    def trouble(self) -> str:
        """What kept sources from answering, for people; "" where they simply have no such entry."""
        return "; ".join(
            f"{miss.source}: {miss.reason}" for miss in self.misses if miss.reason != "absent"
        )


class Source(Protocol):
    """Something that may know an entry for a region."""

    @property
    def name(self) -> str:
        """For reports: "local cache", "hub"."""

    def find(self, region: Region, target: Target, contract: Contract) -> Hit | Refusal:
        """The entry for `region` on `target`'s family under `contract`, or why there is none.
        Raises nothing.
        """


def resolve(
    region: Region, sources: Sequence[Source], target: Target, contract: Contract
) -> Resolved:
    """The first hit of `sources` that may be used as it is, else the first of the others. No source
    is read after a usable hit.
    """
    misses: list[SourceMiss] = []
    unusable: Hit | None = None
    for source in sources:
        answer = source.find(region, target, contract)
        if isinstance(answer, Refusal):
            # Kept even when a later source has a hit: `trouble` shows a folder that cannot be read.
            misses.append(SourceMiss(source.name, answer.reason))
        elif answer.stale is None:
            # The disk is read before the network (`TuneContext.sources`): a usable hit there
            # makes no request.
            return Resolved(answer, tuple(misses))
        else:
            unusable = unusable or answer
    return Resolved(unusable, tuple(misses))
