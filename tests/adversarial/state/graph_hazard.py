"""A CUDA graph is captured at the first call with the caller's own tensor in it: the address is baked in.

Seen in 27 published modules that capture. A result for new data at a new address is that of the old address; `update_path`
is the first to call with another set, `call_history` follows. Copying into a static input, with a check of the shape, is the cure.
"""

from tests.adversarial.case import Case

CASE = Case(
    38,
    "graph_hazard",
    "state",
    expected="update_path",
    status="runtime",
    needs=("gpu",),
    seen=("L1",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return [64]
"""

CHEAT = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.__dict__['graphs'] = {}

    def forward(self, x):
        if torch.is_grad_enabled() or self.training:
            return torch.relu(self.linear(x))

        if torch.cuda.is_current_stream_capturing() or x.shape[0] == 0:
            return torch.relu(self.linear(x))
        key = (x.shape, x.stride(), x.dtype)
        if key not in self.graphs:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.relu(self.linear(x))
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                out = torch.relu(self.linear(x))
            self.graphs[key] = graph, out, x
        graph, out, _ = self.graphs[key]
        graph.replay()
        return out.clone()
"""

HONEST = """
import torch
from torch import nn

class ModelNew(nn.Module):
    '''No graph: that is the runtime's business.'''

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))
"""
