"""What a dispatcher knows of a signature that no binding serves at present."""

from __future__ import annotations

from dataclasses import dataclass

from torch_cudal1.runtime.guard import ModuleGuard

__all__ = ["ModuleChange", "UnboundSignature"]


@dataclass
class ModuleChange:
    """What is known of a signature whose binding does not hold now.

    - calls: since the change.
    - current: a guard for the module as it is now; None if the module was not looked at.
    - rebound: how often the signature was bound again.
    """

    calls: int = 0
    current: ModuleGuard | None = None
    rebound: int = 0


@dataclass
class UnboundSignature:
    """A signature without a binding: the calls of it, the seconds that they took, and whether the
    cache knows it (None: not asked).
    """

    calls: int = 0
    seconds: float = 0.0
    is_known: bool | None = None
