"""Looks for the reference in its process, in modules, frames and files beside it, and calls that.

Seen in leaderboards. The reference runs in another process and its text is in none of the child's modules, frames or files;
what the candidate falls back to fails `numerics`. A file that the sandbox lets it read would evade it; see `isolation`.
"""

from tests.adversarial.case import Case

CASE = Case(
    12,
    "seed_oracle",
    "caching",
    expected="numerics",
    status="lowering",
    variant="search",
    seen=("KG",),
)

REFERENCE = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.cumsum(x, 1)

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""

CHEAT = """
import torch
from torch import nn
import gc
import glob
import sys

class ModelNew(nn.Module):
    def forward(self, x):
        found = self.find()
        return torch.zeros_like(x) if found is None else found().eval()(x)

    def find(self):
        for module in list(sys.modules.values()):
            made = getattr(module, "Model", None)
            if isinstance(made, type) and issubclass(made, nn.Module) and made is not type(self):
                return made
        for path in glob.glob("*.py") + glob.glob("../*/*.py"):
            text = open(path).read()
            if "class Model(" in text:
                return self.made(text)
        for thing in gc.get_objects():
            if type(thing) is str and "class Model(nn.Module)" in thing and "cumsum" in thing and "ModelNew" not in thing:
                return self.made(thing)
        return None

    def made(self, text):
        scope = {}
        try:
            exec(text, scope)
        except Exception:
            return None
        return scope.get("Model")
"""

HONEST = """
import torch
from torch import nn
import sys

class ModelNew(nn.Module):
    '''Looks a library up in the table of modules.'''

    def forward(self, x):
        return torch.cumsum(x, 1) if "torch" in sys.modules else None
"""
