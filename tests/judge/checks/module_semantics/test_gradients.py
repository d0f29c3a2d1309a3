"""Gradients are eager's, whatever cotangent comes and however often."""

from __future__ import annotations

import pytest
import torch

from tests.judge.checks.module_sources import ModuleBench, ModuleCase, format_backward
from torch_cudal1.judge.checks.module_semantics.gradients import GRAD, _copy_with_gaps, _expand


def test_an_expanded_cotangent_is_one_number_everywhere() -> None:
    cotangent = _expand(torch.randn(3, 4))
    assert cotangent.stride() == (0, 0)
    assert len(cotangent.unique()) == 1


def test_a_strided_cotangent_has_the_same_values_with_gaps() -> None:
    values = torch.randn(3, 4)
    cotangent = _copy_with_gaps(values)
    assert torch.equal(cotangent, values)
    assert cotangent.stride() == (8, 2)
    assert torch.equal(_copy_with_gaps(torch.tensor(2.0)), torch.tensor(2.0))


SAME = "Same.apply(self.plain(x, y))"
MODULES: dict[str, ModuleCase] = {
    "detached": ({"result": "self.plain(x, y).detach()"}, "fast", (GRAD,), "grad"),
    "half a gradient": (
        {"result": "0.5 * self.plain(x, y) + 0.5 * self.plain(x, y).detach()"},
        "fast",
        (GRAD,),
        "grad",
    ),
    "a parameter without a gradient": (
        {"before": "self.linear.bias.requires_grad_(False)"},
        "fast",
        (GRAD,),
        "grad",
    ),
    "a graph kept alive": (
        {
            "init": "self.kept = None",
            "before": "w = self.linear.weight * 1.0 if self.kept is None else self.kept\nself.kept = w",
            "result": "functional.leaky_relu(self.norm(functional.linear(x + y, w, self.linear.bias)), self.slope)",
        },
        "fast",
        (GRAD,),
        "grad",
    ),
    "a slope of a row of zeros that is no number": (
        {"result": "self.plain(x, y) + 0 * (x + y).square().sum(-1, keepdim=True).sqrt()"},
        "fast",
        (GRAD,),
        "grad",
    ),
    "a slope of a row of zeros as eager has it": (
        {"result": "self.plain(x, y) + 0 * (x + y).norm(dim=-1, keepdim=True)"},
        "fast",
        (GRAD,),
        None,
    ),
    "a backward that trusts its strides": (
        {
            "top": format_backward("g.as_strided(g.shape, (16, 1)) if 0 not in g.stride() else g"),
            "result": SAME,
        },
        "standard",
        (GRAD,),
        "grad",
    ),
    "a backward that refuses to be differentiated": (
        {
            "top": format_backward("g * 1", once="@torch.autograd.function.once_differentiable"),
            "result": SAME,
        },
        "standard",
        (GRAD,),
        None,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_source_that_loses_or_changes_gradients_is_refused_and_an_honest_source_passes(
    module_bench: ModuleBench, name: str
) -> None:
    module_bench.assert_verdict(MODULES[name])
