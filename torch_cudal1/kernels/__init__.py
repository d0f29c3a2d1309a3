"""Built-in kernels, lowered to data-only Programs of cubins.

Matrix products, convolutions, attention and its backward, softmax, norms, losses, reductions,
scans, pooling, element-wise chains.

`propose` looks at an island's reference Program, `build` compiles a proposal (in the judge's build
process, without a GPU).
"""

from torch_cudal1.kernels.codegen.compile import build
from torch_cudal1.kernels.lowering import propose
from torch_cudal1.kernels.proposal import Proposal

__all__ = ["Proposal", "build", "propose"]
