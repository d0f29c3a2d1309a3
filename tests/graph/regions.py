"""Test helper: regions of small modules, inputs to run them with, and the operators of their fusion
groups.
"""

from __future__ import annotations

import torch
from torch import nn

from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.lower import lower

CPU = torch.device("cpu")
NORM = "_native_batch_norm_legit_no_training"


class TupleOutput(nn.Module):
    """A module whose output is a tuple, as a trace wants it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        out = self.inner(*args)
        return out if isinstance(out, tuple) else (out,)


def capture_region(module, *inputs):
    """The region of a module in eval mode, its attention in plain operators."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            (graph,) = trace(TupleOutput(module.eval()), list(inputs)).graphs
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
    return lower(graph.module, static=graph.static, name="net").region


def make_inputs(region):
    torch.manual_seed(0)
    return [
        torch.empty_strided(s.shape, s.strides, dtype=s.torch_dtype).uniform_(0.5, 1.5)
        for s in region.program.inputs
    ]


def list_operators(fusion_group):
    """The names of a group's operators, in order."""
    return [step.target.split(".")[1] for step in fusion_group.region.program.steps]


class Diamond(nn.Module):
    """A pointwise step on both sides of a matrix product: one group would not be convex."""

    def forward(self, x):
        y = torch.tanh(x) * 2
        return y @ y + torch.sigmoid(y)


class Chunk(nn.Module):
    """The states that a chunk of a state-space model leaves, and what they give to the next one;
    heads inside rows throughout.
    """

    def forward(self, x, b, c, decay):
        states = torch.einsum("blhn,blhp->bhpn", b * decay.unsqueeze(3), x)
        rows = torch.einsum("blhn,bhpn->blhp", c, states)
        return rows * decay.unsqueeze(3) + x


CHUNK_INPUTS = (*(torch.rand(2, 24, 3, width) for width in (20, 8, 8)), torch.rand(2, 24, 3))
NETS = {
    "chunk": (Chunk(), *CHUNK_INPUTS),
    "mlp": (
        nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Softmax(-1)
        ),
        torch.randn(4, 8),
    ),
    "diamond": (Diamond(), torch.randn(8, 8)),
    "encoder": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 6, 16)),
    "conv": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        torch.randn(2, 3, 9, 9),
    ),
}
