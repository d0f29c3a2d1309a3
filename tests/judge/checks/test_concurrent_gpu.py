"""Streams, the caller's own CUDA graph, threads on streams and TF32 rights: attacks and twins that
need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import CheckResult, Contract
from torch_cudal1.judge.checks.concurrent import CAPTURE, REENTRANCY, STREAM_ORDER
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.tf32 import RIGHTS
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.profiles import PROFILES
from torch_cudal1.judge.reference.source_reference import SourceCandidate, read_reference
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import Child, make_limits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
REFERENCE = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(8, 16, 3), nn.Linear(16 * 14 * 14, 32)
    def plain(self, x): return torch.relu(self.linear(self.conv(x).flatten(1)))
    def forward(self, x): return self.plain(x)
def get_inputs(): return [torch.randn(16, 8, 16, 16)]
def get_init_inputs(): return []
"""


def make_source(body: str) -> str:
    indented = "\n".join(f"        {line}" for line in body.splitlines())
    return REFERENCE.replace("class Model(", "class ModelNew(").replace(
        "def forward(self, x): return self.plain(x)", f"def forward(self, x):\n{indented}"
    )


OTHER_STREAM = """
if not hasattr(self, 's'): self.s = torch.cuda.Stream()
with torch.cuda.stream(self.s): r = self.plain(x)
r.record_stream(self.s)
return r
"""
JOINED_STREAM = """
if not hasattr(self, 's'): self.s = torch.cuda.Stream()
self.s.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(self.s): r = self.plain(x)
torch.cuda.current_stream().wait_stream(self.s)
return r
"""
HOST_BRANCH = "return self.plain(x) if x.sum().item() != 0 else self.plain(x)"
CONSTANT_INSIDE_A_GRAPH = """
if torch.cuda.is_current_stream_capturing() and hasattr(self, 'r'): return self.r.clone()
self.r = self.plain(x)
return self.r.clone()
"""
SHARED = """
if not hasattr(ModelNew, 'box'): ModelNew.box = torch.empty_like(x)
ModelNew.box.copy_(x)
for _ in range(20): ModelNew.box.add_(0)
return self.plain(ModelNew.box)
"""
TF32_PRODUCT = """
before = torch.backends.cuda.matmul.allow_tf32
torch.backends.cuda.matmul.allow_tf32 = True
r = self.plain(x)
torch.backends.cuda.matmul.allow_tf32 = before
return r
"""
ROWS: dict[str, tuple[str, CheckSpec, str | None]] = {
    "work on a stream that nobody joins": (OTHER_STREAM, STREAM_ORDER, "stream_order"),
    "work on a stream that is joined": (JOINED_STREAM, STREAM_ORDER, None),
    "a result that a graph freezes": (CONSTANT_INSIDE_A_GRAPH, CAPTURE, "capture"),
    "the host reads a number": (HOST_BRANCH, CAPTURE, "capture"),
    "captured as eager is": ("return self.plain(x)", CAPTURE, None),
    "scratch shared by instances": (SHARED, REENTRANCY, "reentrancy"),
    "threads beside each other": ("return self.plain(x)", REENTRANCY, None),
    "TF32 where only convolutions may": (TF32_PRODUCT, RIGHTS, "rights"),
    "each class within its rights": ("return self.plain(x)", RIGHTS, None),
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


SETS = CheckSpec(name="sets", run=_draw_sets, asks="nothing")


TERMS = Contract(rights=("conv",))


@pytest.fixture(scope="module")
def oracle() -> Iterator[Child]:
    with Child(make_limits(Settings(), torch.device("cuda", 0)), TERMS) as child:
        yield child


@pytest.mark.parametrize("name", ROWS)
def test_each_check_stops_its_attack_and_passes_the_twin(oracle: Child, name: str) -> None:
    body, detector, expected = ROWS[name]
    device = torch.device("cuda", 0)
    subject, examples = read_reference(oracle, REFERENCE, device)
    with Child(make_limits(Settings(), device), TERMS) as child:
        trial = Trial(
            subject,
            SourceCandidate(make_source(body)),
            TERMS,
            device,
            child,
            examples,
            profile=PROFILES["standard"],
        )
        trial.profile = replace(trial.profile, distributions=(), seeds=1)
        trial.load("candidate", trial.candidate)
        checks = (SETS, detector) if detector is RIGHTS else (NUMERICS, detector)
        refused = [check for check in validate(trial, checks=checks).checks if not check.passed]
    assert (refused[0].name if refused else None) == expected, refused
