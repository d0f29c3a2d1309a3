"""The cases of the kernel families: modules as KernelBench has them, fp32 inputs too large for the
L2 cache. Data only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_cudal1.api.special import log_bessel_i, log_bessel_k

__all__ = ["CASES", "FamilyCase", "FunctionModule", "embed_rotary", "make_chunked_scan"]

_IMAGE = (16, 64, 512, 512)  # 1 GiB, like the other sizes here where nothing else is said


class FunctionModule(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        """The function of the tensors."""
        return self.function(*tensors)


@dataclass(frozen=True)
class FamilyCase:
    """Makers of a module and its inputs, on torch's default device. `products`: fusion groups are
    made around matrix products too.
    """

    family: str
    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    products: bool = False


def _function_case(
    family: str, name: str, function: Callable[..., Any], *shapes: tuple[int, ...]
) -> FamilyCase:
    """A case of a function on uniform numbers from 0 to 1."""
    return FamilyCase(
        family, name, lambda: FunctionModule(function), lambda: tuple(map(torch.rand, shapes))
    )


def _layer_case(
    family: str, name: str, module: Callable[[], nn.Module], *shapes: tuple[int, ...]
) -> FamilyCase:
    return FamilyCase(family, name, module, lambda: tuple(map(torch.rand, shapes)))


def _attention_case(
    name: str, module: Callable[[], nn.Module], *shapes: tuple[int, ...], mask: int = 0
) -> FamilyCase:
    """A case on normal numbers; `mask`: the last input is a lower triangle of ones of this size."""

    def inputs() -> tuple[Tensor, ...]:
        tensors = tuple(map(torch.randn, shapes))
        return (*tensors, torch.tril(torch.ones(1, 1, mask, mask))) if mask else tensors

    return FamilyCase("attention", name, module, inputs, products=True)


def _make_masked_attention(heads: int, weigh: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Masked attention as a user writes it, on (batch, positions, channels)."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        batch, positions, channels = q.shape
        q, k, v = (
            t.view(batch, positions, heads, channels // heads).transpose(1, 2) for t in (q, k, v)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / (k.size(-1) ** 0.5))
        scores = scores.masked_fill(mask[:, :, :positions, :positions] == 0, float("-inf"))
        return (weigh(scores) @ v).transpose(1, 2).contiguous().view(batch, positions, channels)

    return run


def _cumsum_exclusive(x: Tensor) -> Tensor:
    sums = torch.cumsum(x.narrow(1, 0, x.size(1) - 1), 1)
    return torch.cat((torch.zeros_like(x.select(1, 0).unsqueeze(1)), sums), 1)


def _self_attention_case() -> FamilyCase:
    def inputs() -> tuple[Tensor, ...]:
        x = torch.randn(16384, 2, 128)
        return x, x, x

    return FamilyCase(
        "attention",
        "self attention, 4 heads of 32, 16384 positions",
        lambda: nn.MultiheadAttention(128, 4),
        inputs,
        True,
    )


_SOFTMAX = (
    _function_case("softmax", "softmax of 4096", lambda x: x.softmax(1), (65536, 4096)),
    _function_case("softmax", "softmax of 131072", lambda x: x.softmax(1), (2048, 131072)),
    _function_case("softmax", "softmax of 393216", lambda x: x.softmax(1), (1024, 393216)),
    _function_case("softmax", "log softmax of 393216", lambda x: x.log_softmax(1), (1024, 393216)),
)
_NORMS = (
    _layer_case("norm", "layer norm of 4096", lambda: nn.LayerNorm(4096), (65536, 4096)),
    _layer_case(
        "norm", "layer norm of 64x256x256", lambda: nn.LayerNorm((64, 256, 256)), (16, 64, 256, 256)
    ),
    _function_case("norm", "rms norm of 4096", lambda x: F.rms_norm(x, (4096,)), (65536, 4096)),
    _function_case(
        "norm",
        "rms norm over channels",
        lambda x: x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5),
        _IMAGE,
    ),
    _layer_case("norm", "batch norm in training", lambda: nn.BatchNorm2d(64).train(), _IMAGE),
    _layer_case("norm", "instance norm", lambda: nn.InstanceNorm2d(64), _IMAGE),
    _layer_case("norm", "group norm", lambda: nn.GroupNorm(8, 64), _IMAGE),
    _function_case("norm", "frobenius norm", lambda x: x / torch.norm(x, p="fro"), _IMAGE),
    _function_case(
        "norm",
        "L1 norm of 65535",
        lambda x: x / torch.mean(torch.abs(x), dim=1, keepdim=True),
        (4096, 65535),
    ),
    _function_case(
        "norm",
        "L2 norm of 65535",
        lambda x: x / torch.norm(x, p=2, dim=1, keepdim=True),
        (4096, 65535),
    ),
)


def _half_precision_case(
    name: str, module: Callable[..., nn.Module], columns: int, dtype: torch.dtype
) -> FamilyCase:
    """4096 rows of half precision: 8 to 100 MB, of which the smaller ones fit the L2 cache."""
    kind = "fp16" if dtype is torch.float16 else "bf16"
    return FamilyCase(
        "half rows",
        f"{name} of {columns}, 4096 rows, {kind}",
        lambda: module(columns, dtype=dtype),
        lambda: (torch.rand(4096, columns).to(dtype),),
    )


_SOFTMAX_OF_ROWS = FunctionModule(lambda x: x.softmax(1))
_HALF_ROWS = (
    *(
        _half_precision_case(
            "softmax",
            lambda _, dtype: FunctionModule(lambda x: x.softmax(1)),
            columns,
            torch.float16,
        )
        for columns in (1024, 2560, 6400, 12672)
    ),
    *(
        _half_precision_case("layer norm", nn.LayerNorm, columns, torch.bfloat16)
        for columns in (1024, 4096, 8192, 15360)
    ),
    *(
        _half_precision_case("rms norm", nn.RMSNorm, columns, torch.bfloat16)
        for columns in (2048, 4096, 8192, 16384)
    ),
)
_REDUCTIONS = (
    _function_case(
        "reduction",
        "sum over dimension 1",
        lambda x: torch.sum(x, dim=1, keepdim=True),
        (16, 4096, 4095),
    ),
    _function_case(
        "reduction", "max over dimension 1", lambda x: torch.max(x, dim=1)[0], (16, 4096, 4095)
    ),
    _function_case(
        "reduction", "argmax over dimension 1", lambda x: torch.argmax(x, dim=1), (16, 4096, 4095)
    ),
)
_ROWS = (8192, 32768)
_SCANS = (
    _function_case("scan", "cumsum", lambda x: x.cumsum(1), _ROWS),
    _function_case("scan", "cumprod", lambda x: x.cumprod(1), _ROWS),
    _function_case("scan", "reverse cumsum", lambda x: x.flip(1).cumsum(1).flip(1), _ROWS),
    _function_case("scan", "exclusive cumsum", _cumsum_exclusive, _ROWS),
    FamilyCase(
        "scan",
        "masked cumsum",
        lambda: FunctionModule(lambda x, mask: torch.cumsum(x * mask, dim=1)),
        lambda: (torch.rand(_ROWS), torch.rand(_ROWS) > 0.5),
    ),
)
_SQUARE = (16384, 16384)
_LOSSES = (
    _function_case(
        "loss", "mean squared error", lambda a, b: torch.mean((a - b) ** 2), _SQUARE, _SQUARE
    ),
    _function_case("loss", "smooth L1", F.smooth_l1_loss, _SQUARE, _SQUARE),
    FamilyCase(
        "loss",
        "hinge",
        lambda: FunctionModule(lambda a, b: torch.mean(torch.clamp(1 - a * b, min=0))),
        lambda: (torch.rand(_SQUARE), torch.rand(_SQUARE[1]).round() * 2 - 1),
    ),
    FamilyCase(
        "loss",
        "KL divergence",
        lambda: FunctionModule(lambda a, b: F.kl_div(torch.log(a), b, reduction="batchmean")),
        lambda: (torch.rand(_SQUARE) + 1e-3, torch.rand(_SQUARE)),
    ),
    _layer_case("loss", "triplet", lambda: nn.TripletMarginLoss(margin=1.0), *[(32768, 8192)] * 3),
    FamilyCase(
        "loss",
        "cross entropy",
        lambda: FunctionModule(F.cross_entropy),
        lambda: (torch.rand(32768, 4096), torch.randint(0, 4096, (32768,))),
    ),
)
_POOLS = (
    _layer_case(
        "pooling", "max pool 1-D, dilated", lambda: nn.MaxPool1d(8, 1, 4, 3), (64, 192, 16384)
    ),
    _layer_case("pooling", "max pool 2-D", lambda: nn.MaxPool2d(4, 1, 1, 1), _IMAGE),
    _layer_case(
        "pooling", "max pool 3-D, dilated", lambda: nn.MaxPool3d(3, 2, 1, 3), (8, 32, 128, 128, 128)
    ),
    _layer_case("pooling", "average pool 1-D", lambda: nn.AvgPool1d(8, 1, 4), (64, 128, 32768)),
    _layer_case("pooling", "average pool 2-D", lambda: nn.AvgPool2d(11), (4, 64, 1024, 1024)),
    _layer_case(
        "pooling", "average pool 3-D", lambda: nn.AvgPool3d(3, 2, 1), (8, 32, 64, 128, 128)
    ),
)
_HEADS_64 = ((16, 12, 1024, 64),) * 3
_ATTENTIONS = (
    _attention_case(
        "written out, causal, heads of 96",
        lambda: FunctionModule(_make_masked_attention(8, lambda scores: scores.softmax(-1))),
        *[(128, 512, 768)] * 3,
        mask=1024,
    ),
    _attention_case(
        "written out, relu, heads of 64",
        lambda: FunctionModule(_make_masked_attention(12, F.relu)),
        *[(16, 1024, 768)] * 3,
        mask=1024,
    ),
    _self_attention_case(),
    _attention_case(
        "fused, heads of 64", lambda: FunctionModule(F.scaled_dot_product_attention), *_HEADS_64
    ),
    _attention_case(
        "fused, causal, heads of 64",
        lambda: FunctionModule(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        ),
        *_HEADS_64,
    ),
    _attention_case(
        "fused, heads of 1024",
        lambda: FunctionModule(F.scaled_dot_product_attention),
        *[(4, 32, 512, 1024)] * 3,
    ),
    _attention_case(
        "fused, heads of 32, long",
        lambda: FunctionModule(F.scaled_dot_product_attention),
        *[(2, 4, 16384, 32)] * 3,
    ),
)


def make_chunked_scan(length: int) -> Callable[..., Tensor]:
    """The recurrence of a state-space layer in chunks of `length` positions, as products (Dao and
    Gu 2024, section 6).

        state[t] = exp(a[t]) state[t - 1] + b[t] x[t]^T,   y[t] = c[t] state[t]

    x: (batch, positions, heads, size), a: (batch, positions, heads), b and c: (batch, positions,
    heads, states); y is like x.
    """

    def decays(until: Tensor, since: Tensor, diagonal: int) -> Tensor:
        allowed = (
            torch.ones(until.shape[-1], since.shape[-1], device=until.device).tril(diagonal) == 1
        )
        return (
            (until.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(~allowed, float("-inf")).exp()
        )

    def run(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        batch, positions, heads, size = x.shape
        x, b, c = (t.view(batch, positions // length, length, heads, -1) for t in (x, b, c))
        sums = a.view(batch, positions // length, length, heads).permute(0, 3, 1, 2).cumsum(-1)
        inside = torch.einsum("bclhn,bcshn->bclhs", c, b) * decays(sums, sums, 0).permute(
            0, 2, 3, 1, 4
        )
        within_chunk = torch.einsum("bclhs,bcshp->bclhp", inside, x)
        decay_to_end = (sums[..., -1:] - sums).exp().permute(0, 2, 3, 1).unsqueeze(-1)
        states = torch.einsum("bclhn,bclhp->bchnp", b * decay_to_end, x)
        totals = sums[..., -1].cumsum(-1)
        before = torch.einsum(
            "bhzc,bchnp->bzhnp", decays(F.pad(totals, (1, 0))[..., :-1], totals, -1), states
        )
        earlier = torch.einsum("bclhn,bchnp->bclhp", c, before) * sums.exp().permute(
            0, 2, 3, 1
        ).unsqueeze(-1)
        return (within_chunk + earlier).reshape(batch, positions, heads, size)

    return run


def _state_space_case(
    name: str, batch: int, positions: int, heads: int, size: int, states: int
) -> FamilyCase:
    def inputs() -> tuple[Tensor, ...]:
        wide = (batch, positions, heads)
        return (
            torch.randn(*wide, size),
            -torch.rand(wide),
            torch.randn(*wide, states),
            torch.randn(*wide, states),
        )

    return FamilyCase(
        "state space", name, lambda: FunctionModule(make_chunked_scan(64)), inputs, products=True
    )


_STATE_SPACES = (
    _state_space_case("Mamba 2, 16 states", 64, 2048, 16, 64, 16),
    _state_space_case("Mamba 2, 128 states", 16, 2048, 16, 64, 128),
)


def _multiply_int4(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x times weights of four bits, two to a byte, in groups of 128."""
    rows, half = packed.shape
    bits = torch.stack((packed & 15, packed >> 4), -1).view(rows, 2 * half // 128, 128)
    return x @ ((bits.to(x.dtype) - 8) * scales[..., None]).view(rows, 2 * half).t()


def _int4_case(name: str, rows: int) -> FamilyCase:
    def inputs() -> tuple[Tensor, ...]:
        packed = torch.randint(0, 256, (14336, 2048), dtype=torch.uint8)
        return torch.randn(rows, 4096).half(), packed, torch.rand(14336, 32).half()

    return FamilyCase("gemm", name, lambda: FunctionModule(_multiply_int4), inputs, products=True)


_INT4_WEIGHTS = tuple(
    _int4_case(f"weights of four bits, {name}", rows)
    for name, rows in (("one row", 1), ("eight rows", 8), ("64 rows", 64))
)


def embed_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al. 2021) as decoders write it: (batch, positions, heads,
    size) to heads first.
    """

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotate(q.transpose(1, 2)), rotate(k.transpose(1, 2))


def _rotary_case(name: str, positions: int, dtype: torch.dtype) -> FamilyCase:
    def inputs() -> tuple[Tensor, ...]:
        angles = torch.arange(positions)[:, None] / 10_000 ** (torch.arange(64) / 64)
        tables = (
            wave(torch.cat((angles, angles), -1)).to(dtype) for wave in (torch.cos, torch.sin)
        )
        return (*(torch.randn(4, positions, heads, 128).to(dtype) for heads in (32, 8)), *tables)

    return FamilyCase("elementwise", name, lambda: FunctionModule(embed_rotary), inputs)


_SPECIAL = (
    _rotary_case("rotary embedding, 8192 positions", 8192, torch.float32),
    _rotary_case("rotary embedding, 8192 positions, bf16", 8192, torch.bfloat16),
    _function_case(
        "elementwise", "log I_v, order 255", lambda x: log_bessel_i(255.0, x * 900 + 1), (1 << 20,)
    ),
    _function_case(
        "elementwise", "log K_v, order 2.5", lambda x: log_bessel_k(2.5, x * 30 + 0.01), (1 << 20,)
    ),
)
CASES = (
    *_SOFTMAX,
    *_NORMS,
    *_HALF_ROWS,
    *_REDUCTIONS,
    *_SCANS,
    *_LOSSES,
    *_POOLS,
    *_ATTENTIONS,
    *_STATE_SPACES,
    *_INT4_WEIGHTS,
    *_SPECIAL,
)
