"""Graph rewrites: named rules over functional ATen graphs, each with a validity condition and a
property test.

`RULES` lists them in the order they are tried; `rewrite` applies them. Cleaning rules come first,
so that the others see patterns without the noise of capture.
"""

from __future__ import annotations

from torch_cudal1.graph.rewrite.algebra_rules import ALGEBRA_RULES
from torch_cudal1.graph.rewrite.apply import RewriteResult, rewrite
from torch_cudal1.graph.rewrite.attention_rules import ATTENTION_RULES, ATTENTION_SCALE_RULES
from torch_cudal1.graph.rewrite.constant_rules import CONSTANT_RULES
from torch_cudal1.graph.rewrite.encoder_rules import ENCODER_RULES
from torch_cudal1.graph.rewrite.fusion_rules import FUSION_RULES
from torch_cudal1.graph.rewrite.identity_rules import IDENTITY_RULES
from torch_cudal1.graph.rewrite.projection_rules import PROJECTION_RULES
from torch_cudal1.graph.rewrite.reduction_rules import REDUCTION_RULES
from torch_cudal1.graph.rewrite.rule import Rule
from torch_cudal1.graph.rewrite.triangular_rules import TRIANGULAR_RULES

__all__ = ["RULES", "RewriteResult", "Rule", "rewrite"]

RULES: tuple[Rule, ...] = (
    # Clean first: later rules match patterns without the views and copies of the capture.
    *IDENTITY_RULES,
    *CONSTANT_RULES,
    *REDUCTION_RULES,
    # Before factors are folded into products.
    *ATTENTION_SCALE_RULES,
    *ALGEBRA_RULES,
    *TRIANGULAR_RULES,
    *ATTENTION_RULES,
    *ENCODER_RULES,
    *PROJECTION_RULES,
    *FUSION_RULES,
)
