"""From ATen to kernel text: what a fusion group computes, as expressions, loop nests and templates.

Lowered to data-only Programs of cubins: matrix products, convolutions, attention and its backward,
softmax, norms, losses, reductions, scans, pooling, element-wise chains, recurrent layers. `propose`
looks at a fusion group's reference Program, `build` compiles a proposal (in a process of the judge's,
without a GPU). May import `core`, `ir` and `device`. Read `proposal`, `expr/nodes`, `lowering`.
"""

from torch_cudal1.kernels.codegen.compile import build
from torch_cudal1.kernels.lowering import propose
from torch_cudal1.kernels.proposal import Proposal

__all__ = ["Proposal", "build", "propose"]
