"""What a rewrite rule is.

A rule edits a functional ATen graph in place and keeps its meaning; it must hold for every input
value, NaN and infinity included, unless it says `finite_only` (then it runs only under
`assume_finite=True`). It may change rounding: the judge decides whether that is within the
contract. Applying rules, cleaning up and refreshing `meta["val"]` is `apply`'s work, not a rule's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.fx as fx

__all__ = ["Rule"]


@dataclass(frozen=True)
class Rule:
    """`rewrite(gm)` edits `gm.graph` in place and returns the number of sites it changed (0:
    nothing to do).

    `name` is the technique shown to users ("diag_matmul"). New nodes need no `meta["val"]`: it is
    recomputed after each rule.
    """

    name: str
    rewrite: Callable[[fx.GraphModule], int]
    # False by default: a rule has to say that it needs finite values.
    finite_only: bool = False
