"""State dicts, train mode, autocast and copies are as the reference's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.judge.checks.module_sources import FORWARD, ModuleBench, ModuleCase, format_backward
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.judge.checks.module_semantics.modes import (
    MODE,
    STATE_DICT,
    TRAIN_MODE,
    TRANSFORMS,
    _find_state_problem,
)

REFERENCE: Any = SimpleNamespace(
    form=SimpleNamespace(names=("weight", "bias")),
    specs=(TensorSpec.of(torch.empty(3, 2)), TensorSpec.of(torch.empty(3))),
)
WEIGHT, BIAS = ["weight", "float32", [3, 2]], ["bias", "float32", [3]]


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ([WEIGHT, BIAS], ""),
        ([WEIGHT], "lacks ['bias']"),
        ([WEIGHT, BIAS, ["kept", "float32", [1]]], "has ['kept']"),
        ([WEIGHT, ["bias", "float16", [3]]], "bias is"),
        ([["weight", "float32", [2, 3]], BIAS], "weight is"),
    ],
)
def test_names_dtypes_and_shapes_are_the_references(state: list[Any], problem: str) -> None:
    actual_problem = _find_state_problem(REFERENCE, state)
    assert problem in actual_problem if problem else not actual_problem


# An identity with a derivative of its own.
_WITH_JVP = """
class Same(torch.autograd.Function):
    generate_vmap_rule = True
    @staticmethod
    def forward(r): return r * 1
    @staticmethod
    def setup_context(ctx, inputs, output): pass
    @staticmethod
    def backward(ctx, g): return g * 1
    @staticmethod
    def jvp(ctx, d): return {derivative}
"""
MODULES: dict[str, ModuleCase] = {
    "an extra buffer": (
        {"init": "self.register_buffer('extra', torch.zeros(1))"},
        "fast",
        (STATE_DICT,),
        "run",
    ),
    "a buffer that comes late": (
        {"before": "if not hasattr(self, 'late'): self.register_buffer('late', torch.zeros(1))"},
        "standard",
        (MODE,),
        "mode",
    ),
    "it cannot be copied": ({"init": "self.lock = threading.Lock()"}, "standard", (MODE,), "mode"),
    "the statistics of eval always": (
        {
            "forward": FORWARD.replace("self.norm(", "functional.batch_norm(").replace(
                "x + y)",
                "x + y), self.norm.running_mean, self.norm.running_var, self.norm.weight, self.norm.bias",
            )
        },
        "fast",
        (TRAIN_MODE,),
        "mode",
    ),
    "the statistics of the first step only": (
        {
            "before": "if self.training and int(self.norm.num_batches_tracked) > 0: self.norm.momentum = 0.0"
        },
        "fast",
        (TRAIN_MODE,),
        "mode",
    ),
    "the statistics of an instance's first step only": (
        {
            "init": "self.steps = 0",
            "before": "self.steps += self.training and torch.is_grad_enabled()\n"
            "if self.steps > 1 and self.training: self.norm.momentum = 0.0",
        },
        "fast",
        (TRAIN_MODE,),
        "mode",
    ),
    "statistics of eval from before the training": (
        {
            "init": "self.kept = None",
            "before": "n = self.norm\nif not self.training:\n"
            "    if self.kept is None: self.kept = n.running_mean.clone(), n.running_var.clone()\n"
            "    r = functional.batch_norm(self.linear(x + y), *self.kept, n.weight, n.bias)",
            "result": "self.plain(x, y) if self.training else functional.leaky_relu(r, self.slope)",
        },
        "fast",
        (TRAIN_MODE,),
        "mode",
    ),
    "one mask in every step": (
        {"before": "if self.training: torch.manual_seed(torch.initial_seed())"},
        "fast",
        (TRAIN_MODE,),
        "mode",
    ),
    "weights that stay behind while it trains": (
        {
            "init": "self.kept = None",
            "before": "if not self.training or self.kept is None: self.kept = self.linear.weight.detach().clone()",
            "result": "functional.dropout(functional.leaky_relu(self.norm(functional.linear(x + y, self.linear.weight"
            " + (self.kept - self.linear.weight).detach() * self.training, self.linear.bias)), self.slope), 0.5, self.training)",
        },
        "fast",
        (TRAIN_MODE,),
        "mode",
    ),
    "forward-mode derivatives of another function": (
        {
            "top": _WITH_JVP.format(derivative="1.5 * d"),
            "result": "Same.apply(self.plain(x, y))",
        },
        "standard",
        (TRANSFORMS,),
        "mode",
    ),
    "forward-mode derivatives of its own": (
        {"top": _WITH_JVP.format(derivative="d * 1"), "result": "Same.apply(self.plain(x, y))"},
        "standard",
        (TRANSFORMS, TRAIN_MODE),
        None,
    ),
    "no forward-mode derivatives": (
        {"top": format_backward("g * 1"), "result": "Same.apply(self.plain(x, y))"},
        "standard",
        (TRANSFORMS,),
        None,
    ),
    "a batch that is one call's only": (
        {
            "before": "one = not torch._C._functorch.is_batchedtensor(x)",
            "result": "self.plain(x, y) * (1.0 if one else 0.9)",
        },
        "standard",
        (TRANSFORMS,),
        "mode",
    ),
    "dropout dropped": ({"forward": FORWARD.replace("0.5", "0.0")}, "fast", (TRAIN_MODE,), "mode"),
    "autocast switched off": (
        {"result": "torch.autocast('cpu', enabled=False)(self.plain)(x, y)"},
        "standard",
        (MODE,),
        "mode",
    ),
    "all modes": (
        {"before": "self.calls = getattr(self, 'calls', 0) + 1"},
        "standard",
        (STATE_DICT, TRAIN_MODE, MODE),
        None,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_source_whose_state_or_mode_is_not_the_references_is_refused_and_an_honest_source_passes(
    module_bench: ModuleBench, name: str
) -> None:
    module_bench.assert_verdict(MODULES[name])
