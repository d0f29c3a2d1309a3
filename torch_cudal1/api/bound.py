"""What the dispatcher keeps for a signature: a callable and when it is right, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_cudal1.api.pieces import Pieces
from torch_cudal1.graph.module_call import Call, list_call_tensors
from torch_cudal1.runtime.dispatch import DirectCall
from torch_cudal1.search.tune import Choice

__all__ = ["Bound", "Unbound"]


@dataclass(frozen=True)
class Bound:
    """`call(args, kwargs)` is right for a call that it `serves`; `choices` say what runs in it.

    `guard` compares the module; `conditions`, given {module, args, kwargs}, what else Dynamo guards
    (None: nothing); `is_disjoint` says whether the call's arguments share no memory with what the
    call writes to (None: they cannot). `weights`: identities of the module's tensors that `call`
    keeps alive. `direct`: the same call without AOTAutograd's wrapper, where nothing needs it.
    `pieces`: what `call` belongs to where the forward is several graphs; Dynamo guards each of
    them. `own_arguments`: which of the call's tensors are the module's own too.
    """

    call: Call
    guard: Any
    choices: tuple[Choice, ...]
    note: str = ""
    weights: frozenset[int] = frozenset()
    direct: DirectCall | None = None
    conditions: Callable[[dict[str, Any]], bool] | None = None
    is_disjoint: Call | None = None
    pieces: Pieces | None = None
    own_arguments: tuple[tuple[int, int], ...] = ()

    def serves(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether everything that the call depends on, besides values of tensors, is as it was when
        it was captured.
        """
        # In order of cost: one C++ comparison first, Dynamo's guard tree and the walk over the
        # arguments' memory only where the capture needed them.
        return (
            self.guard.holds()
            and self.guard.find_own_tensors(list_call_tensors(args, kwargs)) == self.own_arguments
            and (
                self.conditions is None
                or self.conditions({"module": module, "args": args, "kwargs": kwargs})
            )
            and (self.is_disjoint is None or self.is_disjoint(args, kwargs))
        )


@dataclass(frozen=True)
class Unbound:
    """The module's own forward runs, and why.

    `missed`: nothing is known yet, so a later warm-up may change that. After a change of the
    module, `guard` is what this was decided for (None: for good).
    """

    reason: str
    choices: tuple[Choice, ...] = ()
    missed: bool = False
    guard: Any = None
