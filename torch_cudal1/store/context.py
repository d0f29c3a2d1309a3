"""Where and under which rules decisions are made: a device, its target, the precision contract, the
settings and the cache.

It is all that a process on a warm cache needs to look a decision up; it decides nothing and loads
neither judge nor compilers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import contract_for, target_for
from torch_cudal1.ir.records import Contract, Target
from torch_cudal1.store.bundle.imported import list_imported_roots
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.cache.resolve import Source
from torch_cudal1.store.hub.hub_source import HubSource, list_mirrored_roots, open_hub_source
from torch_cudal1.store.trust.trust_policy import SHIPPED, Rules

__all__ = ["TuneContext", "cache_for", "make_context"]


@dataclass(frozen=True)
class TuneContext:
    """Device, target, contract, settings, cache and Hub in one value."""

    device: torch.device
    target: Target
    contract: Contract
    settings: Settings
    cache: LocalCache
    hub: HubSource | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of entries, in order: the cache with its read-only folders, then the Hub
        where a setting names a repository.
        """
        # The disk first: a usable entry there makes no request.
        return (self.cache, self.hub) if self.hub else (self.cache,)

    def find_decision_record(
        self, name: str, candidates: Sequence[str] | None = None
    ) -> dict[str, Any] | Refusal:
        """The small record under `name`, about exactly these candidates if given, from the first of
        `sources` that has one.
        """
        record = self.cache.get_decision_record(name, self.target, self.contract, candidates)
        return (
            record
            if self.hub is None or not isinstance(record, Refusal)
            else self.hub.find_decision_record(name, self.target, self.contract)
        )


def make_context(device: torch.device, settings: Settings) -> TuneContext:
    """The context of this process on `device`: its target, the contract, the cache and the Hub."""
    return TuneContext(
        device,
        target_for(device),
        contract_for(settings),
        settings,
        cache_for(settings),
        open_hub_source(settings),
    )


def cache_for(settings: Settings) -> LocalCache:
    """The user's own cache; then imported bundles, read-only folders, what is here of a Hub
    repository, and what was shipped.
    """
    read_only = (
        # The order is that of look-ups: an explicit import comes before a shared folder, and that
        # before the Hub's mirror.
        *list_imported_roots(settings.cache_dir),
        *settings.read_only_caches,
        # Read as a folder too, so that what was pulled is found without a request.
        *list_mirrored_roots(settings),
    )
    return LocalCache(
        settings.cache_dir,
        read_only,
        rules=Rules.of(settings),
        shipped=SHIPPED if settings.shipped else None,
    )
