"""The modules that a siege makes wrong: small, each with something of its own to be wrong about."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SUBJECTS", "Subject"]

_HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"


@dataclass(frozen=True)
class Subject:
    """`body`: the class body of the module. `inputs`: expressions of a call's arguments, the first a
    floating tensor of which dimension 0 is a batch. `has_weights`: whether it has parameters.
    `is_pointwise`: whether an element of the result is made of the element of the first input alone.
    `remembers`: position of an argument that is no floating tensor, None where all are.
    """

    name: str
    body: str
    inputs: tuple[str, ...]
    init: tuple[str, ...] = ()
    has_weights: bool = True
    is_pointwise: bool = False
    remembers: int | None = None

    def write_class(self, name: str) -> str:
        """The module as a class of that name."""
        return f"class {name}(nn.Module):\n{self.body}"

    def write_reference(self) -> str:
        """A KernelBench-style source."""
        return (
            f"{_HEAD}\n{self.write_class('Model')}\n"
            f"def get_inputs():\n    return [{', '.join(self.inputs)}]\n\n"
            f"def get_init_inputs():\n    return [{', '.join(self.init)}]\n"
        )

    def write_candidate(self, body: str) -> str:
        """A source whose `ModelNew` inherits the honest module and has this forward."""
        lines = "\n".join(f"        {line}" for line in body.splitlines())
        return (
            f"{_HEAD}import sys\n\n{self.write_class('Honest')}\n"
            f"class ModelNew(Honest):\n    def forward(self, *args):\n{lines}\n"
        )


SUBJECTS = (
    Subject(
        "linear",
        """    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))
""",
        ("torch.randn(32, 64)",),
        ("64",),
    ),
    Subject(
        "silu",
        """    def forward(self, x):
        return x * torch.sigmoid(x)
""",
        ("torch.randn(48, 40)",),
        has_weights=False,
        is_pointwise=True,
    ),
    Subject(
        "norm",
        """    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x, y):
        return self.norm(x + y)
""",
        ("torch.randn(24, 48)", "torch.randn(24, 48)"),
        ("48",),
    ),
    Subject(
        "masked softmax",
        """    def forward(self, x, mask):
        return torch.softmax(x.masked_fill(mask, -1e4), -1)
""",
        ("torch.randn(16, 32, 32)", "torch.rand(32, 32) > 0.7"),
        has_weights=False,
        remembers=1,
    ),
    Subject(
        "gather",
        """    def __init__(self, features):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(features) + 0.5)

    def forward(self, x, index):
        return x[index] * self.scale
""",
        ("torch.randn(40, 32)", "torch.randint(0, 40, (56,))"),
        ("32",),
        remembers=1,
    ),
    Subject(
        "power",
        """    def forward(self, x, exponent):
        return x.abs().add(0.5).pow(exponent)
""",
        ("torch.randn(32, 48)", "1.5"),
        has_weights=False,
        is_pointwise=True,
        remembers=1,
    ),
    Subject(
        "convolution",
        """    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.conv(x))
""",
        ("torch.randn(4, 8, 12, 12)",),
        ("8",),
    ),
)
