"""ATen overloads by name, and the questions a Program asks about them: does it exist, is it functional, is it random."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from torch_cudal1.errors import ProgramError

__all__ = ["is_functional", "is_random", "name_of", "overload"]

_NAMESPACES = ("aten", "prims")


@cache
def overload(target: str) -> Any:
    """The `torch._ops.OpOverload` called `target` ("aten.addmm.default"). Raises ProgramError if there is none.

    Only the `aten` and `prims` namespaces exist for a Program: an operator from another library is code we cannot vouch for.
    """
    parts = target.split(".")
    if len(parts) != 3 or parts[0] not in _NAMESPACES or not all(part.isidentifier() for part in parts):
        raise ProgramError("aten", f"{target!r} is not namespace.op.overload in {_NAMESPACES}")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    found = getattr(packet, parts[2], None) if packet is not None else None
    if not isinstance(found, torch._ops.OpOverload):
        raise ProgramError("aten", f"torch {torch.__version__} has no operator {target!r}")
    return found


def name_of(op: Any) -> str:
    """The inverse of `overload`."""
    return str(op)


@cache
def is_functional(target: str) -> bool:
    """True when the schema writes to no argument."""
    return not overload(target)._schema.is_mutable


@cache
def is_random(target: str) -> bool:
    """True when the result depends on a random generator."""
    op = overload(target)
    return torch.Tag.nondeterministic_seeded in op.tags or any(str(a.type).endswith("Generator") for a in op._schema.arguments)
