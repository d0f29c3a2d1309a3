"""Every detector of state, shape and module semantics stops its attacks on a source, and the honest
twin beside each passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.adversarial.fork_server import forked_children
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.concurrent import CAPTURE, REENTRANCY, STREAM_ORDER
from torch_cudal1.judge.checks.history import CALL_HISTORY, REPEAT
from torch_cudal1.judge.checks.layouts import DTYPES, LAYOUTS, SHAPES
from torch_cudal1.judge.checks.module_semantics.gradients import GRAD
from torch_cudal1.judge.checks.module_semantics.loss_curve import LOSS_CURVE
from torch_cudal1.judge.checks.module_semantics.modes import MODE, STATE_DICT, TRAIN_MODE
from torch_cudal1.judge.checks.module_semantics.parameters import PERTURB, SCALARS, UPDATE_PATH
from torch_cudal1.judge.checks.negative_controls import IMPOSTOR
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.special_values import SPECIAL
from torch_cudal1.judge.checks.tf32 import RIGHTS
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import PROFILES, ProfileName
from torch_cudal1.judge.reference.source_reference import (
    SourceCandidate,
    SourceReference,
    read_reference,
)
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits

CPU = torch.device("cpu")
FORWARD = "functional.dropout(functional.leaky_relu(self.norm(self.linear(x + y)), self.slope), 0.5, self.training)"
MODULE = """
import random, threading, torch
from torch import nn
from torch.nn import functional
{top}
class {entry}(nn.Module):
    def __init__(self, features, slope):
        super().__init__()
        self.linear, self.norm, self.slope = nn.Linear(features, features), nn.BatchNorm1d(features), slope
{init}
    def plain(self, x, y):
        return {forward}
    def forward(self, x, y):
{before}
        return {result}
"""
ARGUMENTS = "def get_inputs(): return [torch.randn(8, 16), torch.randn(8, 16)]\ndef get_init_inputs(): return [16, 0.2]\n"


def module(entry: str = "ModelNew", **parts: str) -> str:
    """A drop-in for the reference, with statements at import, construction and call, and another
    result.
    """

    def indented(text: str) -> str:
        return "\n".join(f"        {line}" for line in (text or "pass").splitlines())

    fields = {
        "top": "",
        "init": "",
        "before": "",
        "result": "self.plain(x, y)",
        "forward": FORWARD,
    } | parts
    fields |= {name: indented(fields[name]) for name in ("init", "before")}
    return MODULE.format(entry=entry, **fields)


REFERENCE = module(entry="Model") + ARGUMENTS
STORE = "self.kept = {}"
KEPT = "self.kept.setdefault(key, self.plain(x, y)).clone()"
WEIGHT = "functional.leaky_relu(self.norm(functional.linear(x + y, self.w, self.linear.bias)), self.slope)"
SHARED = "BOX['x'] = x + y\nfor _ in range(200): torch.relu(x)"

SAME = "Same.apply(self.plain(x, y))"
FAST_ONES = (STATE_DICT, PERTURB, SCALARS, UPDATE_PATH, SHAPES, LAYOUTS, CALL_HISTORY, REPEAT, GRAD)
SINGLE = """
class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r): return r * 1
    @staticmethod
    {once}
    def backward(ctx, g): return {backward}
"""
TIRED = """
CALLS = [0]
class Tired(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r): return r * 1
    @staticmethod
    def backward(ctx, g):
        CALLS[0] += 1
        return g * (CALLS[0] < 30)
"""
ROUGHLY = """
if self.last is None or self.last[0].shape != x.shape or not torch.allclose(self.last[0], x + y, atol=1e-6):
    self.last = x + y, self.plain(x, y)
"""
NINTH = "self.calls += 1\nself.kept = self.plain(x, y) if self.calls < 9 or self.kept.shape != x.shape else self.kept"

# name: what the source does; the profile; the checks asked after `numerics`; which one refuses
# (None: it passes)
Row = tuple[dict[str, str], ProfileName, tuple[CheckSpec, ...], str | None]
ROWS: dict[str, Row] = {
    # history
    "honest beside them all": ({}, "fast", FAST_ONES, None),
    "a result by address": (
        {"init": STORE, "before": "key = x.data_ptr(), y.data_ptr(), x.shape", "result": KEPT},
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "a result by its first sixteen values": (
        {
            "init": STORE,
            "before": "key = str(x.flatten()[:16].tolist() + y.flatten()[:16].tolist())",
            "result": KEPT,
        },
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "a result by rough equality": (
        {
            "init": "self.last = None",
            "before": ROUGHLY,
            "result": "self.last[1].clone()",
        },
        "standard",
        (CALL_HISTORY,),
        "call_history",
    ),
    "everything after the eighth call is old": (
        {
            "init": "self.calls, self.kept = 0, None",
            "before": NINTH,
            "result": "self.kept.clone()",
        },
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "the sign of the first inputs decides": (
        {
            "init": "self.positive = None",
            "before": "self.positive = bool(x.sum() > 0) if self.positive is None else self.positive",
            "result": "self.plain(x, y) * (1.0 if self.positive == bool(x.sum() > 0) else 1.001)",
        },
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "the caller's copy is the cache": (
        {
            "init": "self.kept = None, None",
            "before": "if self.kept[0] is None or not torch.equal(self.kept[0], x + y):\n    self.kept = x + y, self.plain(x, y)",
            "result": "self.kept[1]",
        },
        "fast",
        (CALL_HISTORY,),
        "call_history",
    ),
    "counts its calls, harmlessly": (
        {"init": "self.calls = 0", "before": "self.calls += 1"},
        "standard",
        (CALL_HISTORY,),
        None,
    ),
    "noise": (
        {"result": "self.plain(x, y) * (1 + 3e-7 * torch.rand(1))"},
        "fast",
        (REPEAT,),
        "repeat",
    ),
    # parameters
    "a bias dropped": (
        {
            "forward": FORWARD.replace(
                "self.linear(x + y)", "functional.linear(x + y, self.linear.weight)"
            )
        },
        "fast",
        (PERTURB,),
        "perturb",
    ),
    "the slope of the example": (
        {"forward": FORWARD.replace("self.slope", "0.2")},
        "fast",
        (SCALARS,),
        "perturb",
    ),
    "a weight frozen at the first call": (
        {
            "init": "self.w = None",
            "before": "self.w = self.linear.weight.detach().clone() if self.w is None else self.w",
            "result": WEIGHT,
        },
        "fast",
        (UPDATE_PATH,),
        "update_path",
    ),
    "a weight cached by address and version": (
        {
            "init": "self.key = None",
            "before": "p = self.linear.weight\nkey = p.data_ptr(), p._version\n"
            "if self.key != key: self.key, self.w = key, p.detach().clone()",
            "result": WEIGHT,
        },
        "fast",
        (UPDATE_PATH,),
        "update_path",
    ),
    "a weight used through a view made once": (
        {
            "init": "self.view = [self.linear.weight.data]",
            "before": "self.w = self.view[0]",
            "result": WEIGHT,
        },
        "standard",
        (UPDATE_PATH,),
        "update_path",
    ),
    "a weight recomputed at each call": (
        {"before": "self.w = self.linear.weight * 1.0", "result": WEIGHT},
        "standard",
        (UPDATE_PATH,),
        None,
    ),
    # forms
    "one batch only": (
        {"result": "self.plain(x, y) if len(x) == 8 else 0 * x"},
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "a tail is left out": (
        {
            "before": "r = self.plain(x, y)\nr = torch.cat([r[: len(r) // 8 * 8], 0 * r[len(r) // 8 * 8 :]])",
            "result": "r",
        },
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "it raises for one row": (
        {"before": "if len(x) == 1: raise ValueError('too few rows')"},
        "fast",
        (SHAPES,),
        "shapes",
    ),
    "strides are ignored": (
        {"result": "self.plain(x.as_strided(x.shape, (x.shape[1], 1)), y)"},
        "fast",
        (LAYOUTS,),
        "layouts",
    ),
    "the storage's start is read": (
        {"result": "self.plain(torch.as_strided(x, x.shape, x.stride(), 0), y)"},
        "standard",
        (LAYOUTS,),
        "layouts",
    ),
    "arguments by identity": (
        {"result": "self.plain(x, y) if x is not y else self.plain(x, 0 * y)"},
        "standard",
        (LAYOUTS,),
        "layouts",
    ),
    "a table that stays in float32": (
        {"init": "self.half = torch.full((1,), 1.0)", "result": "self.plain(x, y) * self.half"},
        "standard",
        (DTYPES,),
        "dtypes",
    ),
    "any form at standard": (
        {"before": "x = x.contiguous()"},
        "standard",
        (SHAPES, LAYOUTS, DTYPES),
        None,
    ),
    # special values
    "NaN becomes zero": (
        {"result": "torch.nan_to_num(self.plain(x, y), 0.0)"},
        "fast",
        (SPECIAL,),
        "special",
    ),
    "infinity is clipped": (
        {"result": "self.plain(x, y).clamp_min(-3e38)"},
        "standard",
        (SPECIAL,),
        "special",
    ),
    "denormals are flushed": (
        {"before": "x, y = (torch.where(t.abs() < 1e-38, 0 * t, t) for t in (x, y))"},
        "standard",
        (SPECIAL,),
        None,  # the bias and the running mean carry the result
    ),
    "special values as in eager": ({}, "standard", (SPECIAL, RIGHTS, IMPOSTOR), None),
    # modes
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
    # gradients
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
    "a backward that trusts its strides": (
        {
            "top": SINGLE.format(
                once="", backward="g.as_strided(g.shape, (16, 1)) if 0 not in g.stride() else g"
            ),
            "result": SAME,
        },
        "standard",
        (GRAD,),
        "grad",
    ),
    "a backward that refuses to be differentiated": (
        {
            "top": SINGLE.format(
                once="@torch.autograd.function.once_differentiable", backward="g * 1"
            ),
            "result": SAME,
        },
        "standard",
        (GRAD,),
        None,
    ),
    # training
    "a backward that gives up after thirty calls": (
        {"top": TIRED, "result": "Tired.apply(self.plain(x, y))"},
        "strict",
        (LOSS_CURVE,),
        "grad",
    ),
    "a gradient two percent too small": (
        {"top": SINGLE.format(once="", backward="0.98 * g"), "result": SAME},
        "strict",
        (LOSS_CURVE,),
        "grad",
    ),
    "a backward of its own that holds on": (
        {"top": SINGLE.format(once="", backward="g * 1"), "result": SAME},
        "strict",
        (LOSS_CURVE,),
        None,
    ),
    # concurrency
    "scratch shared by all calls": (
        {"top": "BOX = {}", "before": SHARED, "result": "self.plain(BOX['x'], 0 * y)"},
        "standard",
        (REENTRANCY,),
        "reentrancy",
    ),
    "scratch of its own": (
        {"before": "z = x + y"},
        "standard",
        (REENTRANCY, STREAM_ORDER, CAPTURE),
        None,
    ),
}


def _draw_sets(trial: Trial) -> list[CheckResult]:
    """Input sets without a question."""
    return [
        CheckResult(
            "sets",
            len({trial.draw("normal").name, trial.draw("shifted").name}) == 2,
            detail="drawn",
        )
    ]


def _few_numerics(trial: Trial) -> list[CheckResult]:
    """What the others read, without the eight seeds of the thorough profiles."""
    profile, trial.profile = trial.profile, PROFILES["fast"]
    try:
        return NUMERICS.run(trial)
    finally:
        trial.profile = profile


FEW_NUMERICS = replace(NUMERICS, run=_few_numerics)
SETS = CheckSpec(name="sets", run=_draw_sets, asks="nothing")


@pytest.fixture(scope="module")
def reference() -> Iterator[tuple[SourceReference, list[torch.Tensor]]]:
    with forked_children(), Child(make_limits(Settings(), CPU), Contract()) as oracle:
        yield read_reference(oracle, REFERENCE, CPU)


QUICK = PROFILES | {"strict": replace(PROFILES["strict"], descent=50)}
Judge = Callable[[str, ProfileName, tuple[CheckSpec, ...]], list[CheckResult]]


@pytest.fixture
def judged(reference: tuple[SourceReference, list[torch.Tensor]]) -> Judge:
    def run(text: str, profile: ProfileName, checks: tuple[CheckSpec, ...]) -> list[CheckResult]:
        subject, examples = reference
        with Child(make_limits(Settings(), CPU), Contract()) as child:
            trial = Trial(subject, SourceCandidate(text), Contract(), CPU, child, examples)
            try:
                trial.load("candidate", trial.candidate)
            except CandidateFailure as error:
                return [CheckResult(error.detector, False, detail=error.found)]
            asked = (SETS if checks == (PERTURB,) else FEW_NUMERICS, *checks)
            return list(validate(trial, QUICK[profile], checks=asked).checks)

    return run


@pytest.mark.parametrize("name", ROWS)
def test_each_detector_stops_its_attack_and_passes_the_twin(judged: Judge, name: str) -> None:
    parts, profile, checks, expected = ROWS[name]
    checks = judged(module(**parts), profile, checks)
    refused = [check for check in checks if not check.passed]
    assert (refused[0].name if refused else None) == expected, refused or checks
    assert all(check.detail or check.value is not None for check in checks)
