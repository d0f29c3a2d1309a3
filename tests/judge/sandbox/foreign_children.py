"""Children for foreign code, and honest work for them."""

from __future__ import annotations

import textwrap

import torch

from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.sandbox.child import Child, Limits
from torch_cudal1.judge.wire.call_spec import CallSpec, pack_arguments

CPU = torch.device("cpu")

CALL_SPEC = CallSpec(
    "ModelNew",
    pack_arguments({"args": [], "kwargs": {}}, None),
    (),
    pack_arguments({"args": [torch.ones(1)], "kwargs": {}}, []),
).to_json()

HONEST = """
import threading, torch
class ModelNew(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    def forward(self, x):
        return self.layers(x)
def work():
    torch.set_num_threads(2)
    y = ModelNew()(torch.randn(4, 3, 64, 64)).sum()
    y.backward()
    torch.linalg.svd(torch.randn(64, 64))
    thread = threading.Thread(target=lambda: torch.randn(512, 512) @ torch.randn(512, 512))
    thread.start()
    thread.join()
    open("note", "w").write("scratch may be written")
work()
"""


def start_foreign_child(deadline_s: float = 60.0, **changes: object) -> Child:
    limits: dict[str, object] = {"threads": 2, "trust": "foreign", "phase": "run"} | changes
    return Child(Limits(CPU, deadline_s, **limits), Contract())  # type: ignore[arg-type]


def load_source(child: Child, text: str) -> dict[str, object]:
    return child.call(
        "load_source", slot="candidate", text=textwrap.dedent(text), form=CALL_SPEC, way={}
    )
