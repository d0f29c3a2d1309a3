"""ATen overloads by name, and the questions a Program asks about them: does it exist, is it
functional, is it random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.ops import bessel, grouped_mm, recurrent_ops

__all__ = ["CUSTOM_OPERATORS", "is_functional", "is_random", "name_of", "overload"]

# Names of schema arguments.
_PROBABILITIES = ("dropout_p", "dropout")
# An operator of another library is code that nothing here has checked, and a Program may come from
# another machine.
_NAMESPACES = ("aten", "prims")
# This package's own operators that a Program may name.
CUSTOM_OPERATORS = bessel.TARGETS | grouped_mm.TARGETS


@cache
def overload(target: str) -> Any:
    """The `torch._ops.OpOverload` called `target` ("aten.addmm.default"). Raises ProgramError if
    there is none.

    A Program may name operators of `aten` and `prims`, and those in `CUSTOM_OPERATORS`. For a
    recurrent layer the result is its stand-in (`recurrent_ops.operator_of`), which has the same
    schema and result.
    """
    # PyTorch decomposes a recurrent layer wherever it traces; the stand-in stays one step.
    if target in recurrent_ops.TARGETS:
        return recurrent_ops.operator_of(target)
    if target in bessel.TARGETS:
        return bessel.operator_of(target)
    if target in grouped_mm.TARGETS:
        return grouped_mm.operator_of(target)
    parts = target.split(".")
    if (
        # Identifiers only: the name may come from a file, and getattr must not be led elsewhere.
        len(parts) != 3
        or parts[0] not in _NAMESPACES
        or not all(part.isidentifier() for part in parts)
    ):
        raise ProgramError("aten", f"{target!r} is not namespace.op.overload in {_NAMESPACES}")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    operator = getattr(packet, parts[2], None) if packet is not None else None
    if not isinstance(operator, torch._ops.OpOverload):
        raise ProgramError("aten", f"torch {torch.__version__} has no operator {target!r}")
    return operator


def name_of(op: Any) -> str:
    """The inverse of `overload`."""
    return recurrent_ops.target_of(str(op))


@cache
def is_functional(target: str) -> bool:
    """True when the schema writes to no argument."""
    # By the schema, not by a trailing underscore: `out=` overloads write as well.
    return not overload(target)._schema.is_mutable


def is_random(
    target: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> bool:
    """True when a call with these arguments draws random numbers."""
    if not _may_be_random(target):
        return False
    arguments = {
        argument.name: value
        for argument, value in zip(overload(target)._schema.arguments, args, strict=False)
    }
    arguments.update(kwargs or {})
    defaults = {
        argument.name: argument.default_value for argument in overload(target)._schema.arguments
    }
    arguments = {**defaults, **arguments}
    return not (
        # Attention and recurrent operators are tagged as random whatever their arguments. Inference
        # calls them without training or with a probability of 0, and then they draw nothing.
        arguments.get("train", arguments.get("training")) is False
        or any(arguments.get(name) == 0 for name in _PROBABILITIES)
    )


@cache
def _may_be_random(target: str) -> bool:
    op = overload(target)
    # An operator that takes a generator draws from it, whether it has the tag or not.
    return torch.Tag.nondeterministic_seeded in op.tags or any(
        str(a.type).endswith("Generator") for a in op._schema.arguments
    )
