"""Templates: one value each, listed once, and the page that is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.cases import all_cases
from tests.kernels.traced_programs import trace_program
from torch_cudal1.kernels import propose, registry
from torch_cudal1.kernels.__main__ import render_page
from torch_cudal1.kernels.expr.nodes import pointwise
from torch_cudal1.kernels.features import extract_features
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.registry import TEMPLATES, find_template, match_template, trace
from torch_cudal1.kernels.template import FusionRules, target_names
from torch_cudal1.kernels.templates.loop_nest_template import make_template

PAGE = Path(__file__).parents[2] / "docs" / "kernel-templates.md"
HEADING = "run `python -m torch_cudal1.kernels > docs/kernel-templates.md`"


def test_the_page_is_what_the_registry_says() -> None:
    assert PAGE.read_text() == render_page(), HEADING
    for template in TEMPLATES:
        assert f"| `{template.family}` | {template.summary}" in render_page()


def test_each_family_has_one_template() -> None:
    families = [template.family for template in TEMPLATES]
    assert len(families) == len(set(families))
    assert all(find_template(template.family) is template for template in TEMPLATES)
    assert find_template("no such family") is None


def test_an_operator_has_a_handler_in_one_template_only() -> None:
    handled = [name for template in TEMPLATES for name in template.handlers]
    assert len(handled) == len(set(handled))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.family)
def test_fusion_groups_are_made_around_operators_that_the_template_serves(template) -> None:
    rules = template.fusion
    if template.matches_program is None:
        assert rules.anchors <= template.operators
    assert rules.row_results | rules.partial_reads <= rules.anchors
    # Siblings are merged from groups around another template's operators.
    if template.handlers or template.matches_program is not None:
        assert bool(rules.anchors) == (rules.kind != "elementwise")


def test_each_template_of_expressions_has_a_case_that_is_checked_against_float64() -> None:
    served = {trace(trace_program(*case)).family for case in all_cases().values()}
    loop_nests = {t.family for t in TEMPLATES if t.fusion.kind in ("elementwise", "row", "window")}
    assert loop_nests <= served


def test_a_template_is_one_value_in_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle_sine(args, kwargs, outs):
        return (pointwise("libdevice.sin({0})", args[0], dtype=outs[0].torch_dtype),)

    x = torch.empty(64, 1000)
    program = trace_program(lambda x: x.sin() * 2, (x,))
    assert propose(program, 90) == ()
    sine = make_template(
        "sine",
        {"sin.default": handle_sine},
        FusionRules("window", target_names(["sin.default"])),
        summary="Sines.",
        is_shortlisted=True,
    )
    monkeypatch.setattr(registry, "TEMPLATES", (sine, *TEMPLATES))
    template, workload = match_template(program)
    assert template is sine
    assert workload.trace.family == "sine"
    (kernel,) = lower(program, propose(program, 90)[0]).kernels
    assert kernel.symbol.startswith("sine_")
    assert "libdevice.sin" in kernel.text
    assert registry.is_shortlisted("sine")
    assert "aten.sin.default" in registry.list_anchors("window") & registry.list_full_readers()
    features = extract_features(program)
    assert features is not None
    assert features.family == "sine"
