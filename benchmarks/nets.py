"""The networks of the suite, written as users write them, in plain torch.

No dropout (p = 0), so that a training step can be compared with its float64 copy; no cast to a
fixed dtype, so that a float64 copy computes in float64. Sizes, inputs and losses are in
`models.py`.
"""

# mypy: disable-error-code="no-any-return"
# (calling an nn.Module has type Any; a cast in every forward would make these unlike what users write)

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Bert", "FeedForward", "Llama", "Lstm", "ResNet", "UNet", "ViT"]


# --- ResNet-50 (He et al. 2015; the v1.5 variant with the stride in the 3x3 convolution) ----------


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; the output has 4 * width channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> (N, 4 * width, H / stride, W / stride)."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, average pool, classifier."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
                channels = 4 * (width << stage)
        self.layers = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> logits (N, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layers(x))
        return self.fc(torch.flatten(x, 1))


# --- the feed-forward half of a transformer (Vaswani et al. 2017; norms first) --------------------


class FeedForward(nn.Module):
    """Layers x + W2 gelu(W1 norm(x)): nearly all of the work is products of matrices."""

    def __init__(self, hidden: int, inner: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(hidden, inner) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(inner, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            x = x + narrow(F.gelu(wide(norm(x))))
        return x


# --- transformers: ViT (pre-norm), BERT (post-norm), Llama (RMSNorm, RoPE, grouped queries, SwiGLU)


class Attention(nn.Module):
    """Multi-head self-attention with separate projections and biases, no mask."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, hidden) -> the same shape."""
        n, t, hidden = x.shape
        q, k, v = (
            p(x).view(n, t, self.heads, -1).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).reshape(n, t, hidden))


class Encoder(nn.Module):
    """One transformer block with an exact GELU; `pre_norm` as in ViT, else as in BERT."""

    def __init__(self, hidden: int, heads: int, pre_norm: bool, eps: float) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attention = Attention(hidden, heads)
        self.norm1 = nn.LayerNorm(hidden, eps)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.norm2 = nn.LayerNorm(hidden, eps)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, hidden) -> the same shape."""
        if self.pre_norm:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class ViT(nn.Module):
    """Vision transformer: patches of `patch` pixels, a class token, learned positions."""

    def __init__(
        self, image: int, patch: int, hidden: int, layers: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, hidden, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, hidden) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, hidden) * 0.02)
        self.blocks = nn.ModuleList(Encoder(hidden, heads, True, 1e-6) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, 1e-6)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, image, image) -> logits (N, classes)."""
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Bert(nn.Module):
    """BERT encoder with a token-classification head (the fine-tuning set-up of named-entity
    recognition).
    """

    def __init__(
        self, vocabulary: int, positions: int, hidden: int, layers: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, hidden, padding_idx=0)
        self.position_embeddings = nn.Embedding(positions, hidden)
        self.token_type_embeddings = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, 1e-12)
        self.layers = nn.ModuleList(Encoder(hidden, heads, False, 1e-12) for _ in range(layers))
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids (N, T), int64 -> logits (N, T, classes)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        x = self.norm(x + self.token_type_embeddings(torch.zeros_like(input_ids)))
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the dtype of x."""

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> the same shape."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, rotate-half form: x is (N, heads, T, d), cos and sin are (T, d)."""
    first_half, second_half = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second_half, first_half], dim=-1) * sin


class LlamaBlock(nn.Module):
    """Causal grouped-query attention and a SwiGLU feed-forward, each behind an RMSNorm and a
    residual.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, hidden // heads
        self.input_norm = RMSNorm(hidden)
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.post_norm = RMSNorm(hidden)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(N, T, hidden) -> the same shape."""
        n, t, hidden = x.shape
        q = rotate(self.q_proj(x).view(n, t, self.heads, self.width).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(n, t, self.kv_heads, self.width).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(n, t, self.kv_heads, self.width).transpose(1, 2)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(n, t, hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(N, T, hidden) -> the same shape."""
        x = x + self.attend(self.input_norm(x), cos, sin)
        y = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """A stack of Llama blocks between embedding and head: hidden states in, normalised hidden
    states out.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, length: int
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            LlamaBlock(hidden, heads, kv_heads, inner) for _ in range(layers)
        )
        self.norm = RMSNorm(hidden)
        width = hidden // heads
        frequency = 500_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, hidden) -> the same shape."""
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)


# --- LSTM and U-Net -------------------------------------------------------------------------------


class Lstm(nn.Module):
    """A stacked LSTM that classifies a sequence by its last step."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, features) -> logits (N, classes)."""
        out, _ = self.lstm(x)
        return self.head(out[:, -1])


def double_conv(channels: int, width: int) -> nn.Sequential:
    """Twice: 3x3 convolution, GroupNorm, SiLU."""
    first = [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
    return nn.Sequential(
        *first, nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()
    )


class UNet(nn.Module):
    """Encoder and decoder with skip connections, GroupNorm and SiLU as in diffusion models; one
    output channel a class.
    """

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.stem = double_conv(3, width)
        self.down = nn.ModuleList(double_conv(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(double_conv(a + b, a) for a, b in reversed(list(pairwise(widths))))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> logits (N, classes, H, W); H and W are multiples of 2 ** (levels - 1)."""
        skips = [self.stem(x)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for block in self.up:
            x = block(
                torch.cat([skips.pop(), F.interpolate(x, scale_factor=2, mode="nearest")], dim=1)
            )
        return self.head(x)
