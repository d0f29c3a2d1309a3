"""Where and under which rules decisions are made: a device, its target, the precision contract, the settings and the cache.

It is all that a process on a warm cache needs to look a decision up; it decides nothing and loads neither judge nor compilers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_cudal1.machine import contract_for, target_for
from torch_cudal1.records import Contract, Target
from torch_cudal1.settings import Settings
from torch_cudal1.source.cache import LocalCache

__all__ = ["Place", "place_for"]


@dataclass(frozen=True)
class Place:
    """The rules in one value."""

    device: torch.device
    target: Target
    contract: Contract
    settings: Settings
    cache: LocalCache


def place_for(device: torch.device, settings: Settings) -> Place:
    """Probe the machine once and put the rules together."""
    cache = LocalCache(settings.cache_dir, settings.read_only_caches)
    return Place(device, target_for(device), contract_for(settings), settings, cache)
