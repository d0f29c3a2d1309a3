"""Matrix products to measure: sizes, layouts and epilogues, as the fusion group that a search would
see. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.kernels.expr.affine import row_major

__all__ = ["CASES", "GemmCase"]


@dataclass(frozen=True)
class GemmCase:
    """C (batch, m, n) = A B. `layout`: "n" or "t" for A and for B (t: its memory is the
    transpose's). `tail`: what follows the product, some of "bias", "gelu" and "residual" in this
    order, with "+" between them. `siblings`: so many products of one A, each with a B and a bias of
    its own, as query, key and value; no batch, no residual. With the tail "gate" two siblings make
    one result: the SiLU of the first times the second.
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
    siblings: int = 1

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * max(1, self.batch) * self.siblings * self.m * self.n * self.k

    @property
    def family(self) -> str:
        """Of the template that serves it."""
        if self.siblings == 1:
            return "gemm"
        return "gated_gemm" if "gate" in self._tail else "sibling_gemm"

    def specs(self, device: str) -> tuple[TensorSpec, ...]:
        """A, B, and what the tail reads: a bias, a residual. Then B and bias of each sibling."""
        lead = (self.batch,) if self.batch else ()
        specs = [
            _make_matrix_spec(self.dtype, lead, rows, columns, side == "t", device)
            for rows, columns, side in self._sides()
        ]
        if "bias" in self._tail:
            specs.append(TensorSpec(self.dtype, (self.n,), (1,), device))
        if "residual" in self._tail:
            specs.append(_make_matrix_spec(self.dtype, lead, self.m, self.n, False, device))
        return (*specs, *specs[1:] * (self.siblings - 1))

    @property
    def _tail(self) -> tuple[str, ...]:
        return tuple(self.tail.split("+")) if self.tail else ()

    def _sides(self) -> tuple[tuple[int, int, str], ...]:
        return (self.m, self.k, self.layout[0]), (self.k, self.n, self.layout[1])

    def program(self, device: str = "cuda") -> Program:
        """The ATen steps."""
        specs = self.specs(device)
        steps: list[Aten] = []
        results: list[int] = []
        for first in self._list_firsts():
            factors, result = (Value(0), Value(first)), len(specs) + len(steps)
            if "bias" in self._tail:
                steps.append(
                    Aten("aten.addmm.default", (Value(first + 1), *factors), (), (result,))
                )
            else:
                target = "aten.bmm.default" if self.batch else "aten.mm.default"
                steps.append(Aten(target, factors, (), (result,)))
            if "gelu" in self._tail:
                steps.append(Aten("aten.gelu.default", (Value(result),), (), (result + 1,)))
                result += 1
            if "residual" in self._tail:
                operands = (Value(result), Value(len(specs) - 1))
                steps.append(Aten("aten.add.Tensor", operands, (), (result + 1,)))
                result += 1
            results.append(result)
        if "gate" in self._tail:
            opened, result = results[1], len(specs) + len(steps)
            steps.append(Aten("aten.silu.default", (Value(results[0]),), (), (result,)))
            steps.append(Aten("aten.mul.Tensor", (Value(result), Value(opened)), (), (result + 1,)))
            results = [result + 1]
        return Program(specs, tuple(steps), tuple(results))

    def run(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The same in plain PyTorch."""
        results = []
        for first in self._list_firsts():
            if "bias" in self._tail:
                result = torch.addmm(inputs[first + 1], inputs[0], inputs[first])
            else:
                result = (torch.bmm if self.batch else torch.mm)(inputs[0], inputs[first])
            if "gelu" in self._tail:
                result = torch.nn.functional.gelu(result)
            results.append(result + inputs[-1] if "residual" in self._tail else result)
        if "gate" in self._tail:
            return (torch.nn.functional.silu(results[0]) * results[1],)
        return tuple(results)

    def _list_firsts(self) -> range:
        """The input number of each B."""
        step = 2 if "bias" in self._tail else 1
        return range(1, 1 + step * self.siblings, step)

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


def _name_linear(name: str, rows: int, columns: int, inner: int, tail: str = "") -> GemmCase:
    """A linear layer of bfloat16 as models have it: its weight lies along k."""
    shape = f"{rows}x{columns}x{inner}"
    return GemmCase(
        f"{name} {shape}", rows, columns, inner, layout="nt", dtype="bfloat16", tail=tail
    )


# Products of the real models (benchmarks/real_models/zoo.py) with what follows them, at its small
# and large sizes: an encoder's, a vision transformer's, a language model's.
_LAYERS = (
    *(
        case
        for rows, size in ((128, "small"), (4096, "large"))
        for case in (
            _name_linear(f"layer encoder {size} qkv", rows, 768, 768, "bias"),
            _name_linear(f"layer encoder {size} out", rows, 768, 768, "bias+residual"),
            _name_linear(f"layer encoder {size} up", rows, 3072, 768, "bias+gelu"),
            _name_linear(f"layer encoder {size} down", rows, 768, 3072, "bias+residual"),
        )
    ),
    *(
        replace(_name_linear(f"layer {name}", rows, columns, columns, tail), siblings=3)
        for name, rows, columns, tail in (
            ("encoder small q, k and v", 128, 768, "bias"),
            ("encoder large q, k and v", 4096, 768, "bias"),
            ("language small q, k and v", 128, 4096, ""),
            ("language large q, k and v", 2048, 4096, ""),
        )
    ),
    *(
        replace(_name_linear(f"layer {name}", rows, columns, inner, "gate"), siblings=2)
        for name, rows, columns, inner in (
            ("encoder small gate", 128, 2048, 768),
            ("language small gate", 128, 11008, 4096),
            ("language large gate", 2048, 11008, 4096),
        )
    ),
    _name_linear("layer vision small up", 197, 3072, 768, "bias+gelu"),
    _name_linear("layer vision small down", 197, 768, 3072, "bias+residual"),
    _name_linear("layer vision large up", 3152, 3072, 768, "bias+gelu"),
    _name_linear("layer diffusion large up", 1024, 4608, 1152, "bias+gelu"),
    *(
        case
        for rows, size in ((1, "decode"), (128, "small"), (2048, "large"))
        for case in (
            _name_linear(f"layer language {size} out", rows, 4096, 4096, "residual"),
            _name_linear(f"layer language {size} up", rows, 11008, 4096),
            _name_linear(f"layer language {size} down", rows, 4096, 11008, "residual"),
        )
    ),
)
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
    GemmCase("bfloat16 8192", 8192, 8192, 8192, layout="nt", dtype="bfloat16"),
    *_LAYERS,
)
