"""Test helper: regions of small modules, inputs to run them with, and the operators of their fusion
groups.
"""

from __future__ import annotations

import torch
from torch import nn

from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.lower import lower

CPU = torch.device("cpu")


class Flat(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        out = self.inner(*args)
        return out if isinstance(out, tuple) else (out,)


def region_of(module, *inputs):
    with torch.no_grad():
        (graph,) = trace(Flat(module.eval()), list(inputs)).graphs
    return lower(graph.module, static=graph.static, name="net").region


def random_inputs(region):
    torch.manual_seed(0)
    return [
        torch.empty_strided(s.shape, s.strides, dtype=s.torch_dtype).uniform_(0.5, 1.5)
        for s in region.program.inputs
    ]


class Chunk(nn.Module):
    """The states that a chunk of a state-space model leaves, and what they give to the next one;
    heads inside rows throughout.
    """

    def forward(self, x, b, c, decay):
        states = torch.einsum("blhn,blhp->bhpn", b * decay.unsqueeze(3), x)
        rows = torch.einsum("blhn,bhpn->blhp", c, states)
        return rows * decay.unsqueeze(3) + x


NORM = "_native_batch_norm_legit_no_training"


CHUNK = (*(torch.rand(2, 24, 3, width) for width in (20, 8, 8)), torch.rand(2, 24, 3))


def names_of(fusion_group):
    return [step.target.split(".")[1] for step in fusion_group.region.program.steps]
