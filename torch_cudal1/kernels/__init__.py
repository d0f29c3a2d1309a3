"""Built-in kernels: matrix products, softmax, norms, reductions and element-wise chains, lowered to data-only Programs of cubins.

`propose` looks at an island's reference Program, `build` compiles a proposal (in the judge's build process, without a GPU).
Convolutions, attention and scans are not here.
"""

from torch_cudal1.kernels.compile import build
from torch_cudal1.kernels.lower import propose
from torch_cudal1.kernels.plan import Proposal

__all__ = ["Proposal", "build", "propose"]
