"""Matrix products to measure: sizes, layouts and epilogues, as the fusion group that a search would
see. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.kernels.expr.affine import row_major

__all__ = ["CASES", "GemmCase"]


@dataclass(frozen=True)
class GemmCase:
    """C (batch, m, n) = A B. `layout`: "n" or "t" for A and for B (t: its memory is the
    transpose's). `tail`: "" or "bias+gelu".
    """

    name: str
    m: int
    n: int
    k: int
    batch: int = 0
    layout: str = "nn"
    dtype: str = "float32"
    tail: str = ""
    # or "uniform", "wide" (magnitudes over 2^40), "special" (some NaN and infinities)
    values: str = "normal"

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * max(1, self.batch) * self.m * self.n * self.k

    def specs(self, device: str) -> tuple[TensorSpec, ...]:
        """A, B, and the bias if there is one."""
        lead = (self.batch,) if self.batch else ()
        specs = [
            _make_matrix_spec(self.dtype, lead, rows, columns, side == "t", device)
            for rows, columns, side in self._sides()
        ]
        return tuple(
            [*specs, TensorSpec(self.dtype, (self.n,), (1,), device)] if self.tail else specs
        )

    def _sides(self) -> tuple[tuple[int, int, str], ...]:
        return (self.m, self.k, self.layout[0]), (self.k, self.n, self.layout[1])

    def program(self, device: str = "cuda") -> Program:
        """The ATen steps."""
        specs = self.specs(device)
        if not self.tail:
            step = Aten(
                "aten.bmm.default" if self.batch else "aten.mm.default",
                (Value(0), Value(1)),
                (),
                (2,),
            )
            return Program(specs, (step,), (2,))
        steps = (
            Aten("aten.addmm.default", (Value(2), Value(0), Value(1)), (), (3,)),
            Aten("aten.gelu.default", (Value(3),), (), (4,)),
        )
        return Program(specs, steps, (4,))

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The same in plain PyTorch."""
        if self.tail:
            return torch.nn.functional.gelu(torch.addmm(inputs[2], inputs[0], inputs[1]))
        return torch.bmm(*inputs) if self.batch else torch.mm(*inputs)

    def inputs(self, device: str, seed: int = 0) -> tuple[Tensor, ...]:
        """Random tensors of those specs."""
        generator = torch.Generator(device).manual_seed(seed)
        return tuple(
            _fill_tensor(spec, self.values, generator, position)
            for position, spec in enumerate(self.specs(device))
        )


def _make_matrix_spec(
    dtype: str, lead: tuple[int, ...], rows: int, columns: int, transposed: bool, device: str
) -> TensorSpec:
    shape = (*lead, rows, columns)
    strides = row_major((*lead, columns, rows) if transposed else shape)
    return TensorSpec(dtype, shape, (*strides[:-2], 1, rows) if transposed else strides, device)


def _fill_tensor(
    spec: TensorSpec, values: str, generator: torch.Generator, position: int
) -> Tensor:
    tensor = torch.empty_strided(
        spec.shape, spec.strides, dtype=torch.float32, device=generator.device
    )
    tensor = (
        tensor.uniform_(0, 1, generator=generator)
        if values == "uniform"
        else tensor.normal_(generator=generator)
    )
    if values == "wide":
        tensor *= torch.exp2(
            40 * torch.rand(tensor.shape, generator=generator, device=generator.device) - 20
        )
    if values == "special":
        tensor.as_strided((tensor.numel(),), (1,))[:: tensor.numel() // 7] = (
            float("nan"),
            float("inf"),
            -float("inf"),
        )[position % 3]
    return tensor.to(spec.torch_dtype)


_SQUARES = tuple(GemmCase(f"square {size}", size, size, size) for size in (1024, 2048, 4096, 8192))
_LAYOUTS = tuple(
    GemmCase(f"square 4096 {layout}", 4096, 4096, 4096, layout=layout)
    for layout in ("nt", "tn", "tt")
)
CASES: tuple[GemmCase, ...] = (
    GemmCase("small 256", 256, 256, 256),
    GemmCase("ragged 333x517x259", 333, 517, 259),
    GemmCase("ragged batch 3", 200, 300, 500, batch=3, layout="tn"),
    GemmCase("special values", 384, 512, 256, values="special"),
    GemmCase("wide values", 512, 512, 1024, values="wide"),
    GemmCase("uniform 2048", 2048, 2048, 2048, values="uniform"),
    *_SQUARES,
    *_LAYOUTS,
    GemmCase("bias gelu 4096", 4096, 4096, 4096, layout="nt", tail="bias+gelu"),
    GemmCase("linear 1024x8192x8192", 1024, 8192, 8192, layout="nt", tail="bias+gelu"),
    GemmCase("linear 128x16384x4096", 128, 16384, 4096, layout="nt"),
    GemmCase("skinny 16x4096x4096", 16, 4096, 4096, layout="nt"),
    GemmCase("skinny 64x4096x4096", 64, 4096, 4096, layout="nt"),
    GemmCase("vector 2048x1x1048576", 2048, 1, 1 << 20),
    GemmCase("deep 256x256x524288", 256, 256, 524288),
    GemmCase("shallow 32768x32768x64", 32768, 32768, 64),
    GemmCase("irregular 8205x5921x2949", 8205, 5921, 2949),
    GemmCase("tall 32768x32768x32", 32768, 32768, 32),
    GemmCase("narrow 32768x32x32768", 32768, 32, 32768),
    GemmCase("batched 128x512x2048x1024", 512, 2048, 1024, batch=128),
    GemmCase("heads 256x512x512x64", 512, 512, 64, batch=256, layout="nt"),
    GemmCase("half 4096", 4096, 4096, 4096, dtype="float16"),
    GemmCase(
        "bfloat16 4096 bias gelu", 4096, 4096, 4096, layout="nt", dtype="bfloat16", tail="bias+gelu"
    ),
)
