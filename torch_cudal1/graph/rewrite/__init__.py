"""Graph rewrites: named rules over functional ATen graphs, each with a validity condition and a property test.

`RULES` lists them in the order they are tried; `rewrite` applies them. Cleaning rules come first, so that the others see patterns
without the noise of capture.
"""

from __future__ import annotations

from torch_cudal1.graph.rewrite import identity_rules
from torch_cudal1.graph.rewrite.apply import Rewritten, rewrite
from torch_cudal1.graph.rewrite.rule import Rule

__all__ = ["RULES", "Rewritten", "Rule", "rewrite"]

RULES: tuple[Rule, ...] = identity_rules.RULES
