"""The kernel templates, each in one line: what search, fusion and the cost model ask about families.

A template is tried before those below it. `python -m torch_cudal1.kernels` prints the list as
`docs/kernel-templates.md`.
"""

from __future__ import annotations

from torch_cudal1.ir.program import Program
from torch_cudal1.kernels.expr.from_program import Handlers, TracedProgram, read_expressions
from torch_cudal1.kernels.template import FusionKind, Template, TemplateInput
from torch_cudal1.kernels.templates import (
    attention,
    attention_backward,
    conv,
    gemm,
    losses,
    norms,
    pointwise,
    pooling,
    recurrent,
    reductions,
    scans,
    softmax,
)
from torch_cudal1.kernels.templates.hopper import gated, siblings

__all__ = [
    "TEMPLATES",
    "find_template",
    "is_shortlisted",
    "list_anchors",
    "list_elementwise",
    "list_full_readers",
    "list_lone_anchors",
    "list_row_results",
    "match_template",
    "trace",
]

# The order decides: templates of whole Programs first, those of products before those of rows, and
# last the one that takes everything.
TEMPLATES: tuple[Template, ...] = (
    recurrent.TEMPLATE,
    attention_backward.TEMPLATE,
    attention.TEMPLATE,
    conv.TEMPLATE,
    gated.TEMPLATE,
    siblings.TEMPLATE,
    gemm.TEMPLATE,
    softmax.TEMPLATE,
    norms.TEMPLATE,
    pooling.TEMPLATE,
    scans.TEMPLATE,
    losses.TEMPLATE,
    reductions.TEMPLATE,
    pointwise.TEMPLATE,
)


def find_template(family: str) -> Template | None:
    """The template of a family, None for another name."""
    return next((template for template in TEMPLATES if template.family == family), None)


def is_shortlisted(family: str) -> bool:
    """Whether several kernels of a family are timed side by side."""
    template = find_template(family)
    return template is not None and template.is_shortlisted


def list_anchors(*kinds: FusionKind) -> frozenset[str]:
    """The operators that fusion groups of these kinds are made around."""
    anchors = (t.fusion.anchors for t in TEMPLATES if t.fusion.kind in kinds)
    return frozenset().union(*anchors)


def list_full_readers() -> frozenset[str]:
    """The anchors, recurrent layers apart, that need every element of their operands."""
    partial = (template.fusion.partial_reads for template in TEMPLATES)
    return list_anchors("row", "window", "product") - frozenset().union(*partial)


def list_row_results() -> frozenset[str]:
    """The anchors that yield one value a row."""
    return frozenset().union(*(template.fusion.row_results for template in TEMPLATES))


def list_lone_anchors() -> frozenset[str]:
    """The anchors whose kernels take no further step in."""
    rules = (template.fusion for template in TEMPLATES)
    return frozenset().union(*(rule.anchors for rule in rules if not rule.takes_epilogue))


def list_elementwise() -> frozenset[str]:
    """The element-wise operators that kernels have expressions for."""
    templates = (template for template in TEMPLATES if template.fusion.kind == "elementwise")
    return frozenset().union(*(template.operators for template in templates))


def trace(program: Program) -> TracedProgram:
    """The tensor expressions of a reference Program of ATen steps, and the family that serves them.
    Raises NotLowerableError with the reason.
    """
    handlers: Handlers = {template.family: template.handlers for template in TEMPLATES}
    expressions = read_expressions(program, handlers)
    nodes = tuple(output.node for output in expressions.outputs)
    # The last template matches everything, so that there is always one.
    template = next(t for t in TEMPLATES if t.matches(expressions.families, nodes))
    return TracedProgram(expressions.outputs, expressions.leaves, template.family)


def match_template(program: Program) -> tuple[Template, TemplateInput]:
    """The template that serves a reference Program, and the workload that it is given. Raises
    NotLowerableError where no template has expressions for its steps.
    """
    for template in TEMPLATES:
        # Before tracing: a recurrent step or an attention backward has no expressions, and tracing
        # refuses it.
        if template.matches_program is not None and template.matches_program(program):
            return template, TemplateInput(program)
    traced = trace(program)
    template = next(template for template in TEMPLATES if template.family == traced.family)
    return template, TemplateInput(program, traced)
