"""The models of the benchmark: how each is built, with random weights, and what it is called with.

Every model is what its library makes of a published configuration; language models have fewer
layers, at full width. Nothing is downloaded. `small` is a latency size (one item), `large` fills the
GPU. A model's half precision is the one that it is usually served in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "RealModel", "Size", "build_model"]

Size: TypeAlias = Literal["small", "large"]
# A module in eval mode on the CPU, and its keyword or positional arguments.
Built: TypeAlias = "tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]"


@dataclass(frozen=True)
class RealModel:
    """`build(sizes)` makes the module and its arguments in fp32; `sizes` are those of `small` or
    `large`.
    """

    name: str
    library: str
    half: torch.dtype
    build: Callable[..., Built]
    small: Mapping[str, int]
    large: Mapping[str, int]


def build_model(
    name: str, size: Size, precision: str, device: torch.device
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module on `device`, and the arguments of its call. The same weights and inputs in every
    process.

    Raises KeyError for an unknown model, ImportError where its library is not installed.
    """
    model = MODELS[name]
    torch.manual_seed(0)
    # On the device: drawing the weights of a language model takes a CPU half a minute.
    with device:
        module, arguments = model.build(**(model.small if size == "small" else model.large))
    dtype = {"fp32": torch.float32, "half": model.half, "bf16": torch.bfloat16}.get(precision)
    dtype = dtype or torch.float16
    module = module.eval().to(device=device, dtype=dtype)

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, dtype if value.is_floating_point() else None)
        # A cache of keys and values is made on the device by its own class.
        return value(device, dtype) if callable(value) else value

    if isinstance(arguments, tuple):
        return module, tuple(map(move, arguments)), {}
    return module, (), {name: move(value) for name, value in arguments.items()}


def _token_ids(vocabulary: int, batch: int, tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(3, vocabulary, (batch, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _images(batch: int, pixels: int = 224) -> Tensor:
    return torch.randn(batch, 3, pixels, pixels)


def _encoder(kind: str, **config: Any) -> Callable[..., Built]:
    def build(batch: int, tokens: int) -> Built:
        import transformers

        settings = getattr(transformers, f"{kind}Config")(**config)
        module = getattr(transformers, f"{kind}Model")(settings)
        return module, _token_ids(settings.vocab_size, batch, tokens)

    return build


def _causal(kind: str, **config: Any) -> Callable[..., Built]:
    def build(batch: int, tokens: int) -> Built:
        import transformers

        settings = getattr(transformers, f"{kind}Config")(**config)
        module = getattr(transformers, f"{_CAUSAL_CLASSES.get(kind, f'{kind}ForCausalLM')}")(
            settings
        )
        return module, {**_token_ids(settings.vocab_size, batch, tokens), "use_cache": False}

    return build


_CAUSAL_CLASSES = {"GPT2": "GPT2LMHeadModel"}
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def _llama_decode(batch: int, cached: int) -> Built:
    """One token with a static cache, as `generate(cache_implementation="static")` calls the model."""
    import transformers

    settings = transformers.LlamaConfig(**_LLAMA, num_hidden_layers=4)
    module = transformers.LlamaForCausalLM(settings)

    def make_cache(device: torch.device, dtype: torch.dtype) -> Any:
        cache = transformers.StaticCache(config=settings, max_cache_len=2 * cached)
        heads = settings.num_key_value_heads
        shape = (batch, heads, cached, settings.hidden_size // settings.num_attention_heads)
        # The first update gives a static cache its memory, which belongs to no call.
        with torch.no_grad():
            positions = {"cache_position": torch.arange(cached, device=device)}
            for layer in range(settings.num_hidden_layers):
                states = torch.randn(shape, device=device, dtype=dtype)
                cache.update(states, states, layer, positions)
        return cache

    return module, {
        "input_ids": torch.randint(3, 32000, (batch, 1)),
        "past_key_values": make_cache,
        "cache_position": torch.tensor([cached]),
        "position_ids": torch.tensor([[cached]]).expand(batch, 1).contiguous(),
        "use_cache": True,
    }


def _vision(kind: str, class_name: str = "", **config: Any) -> Callable[..., Built]:
    def build(batch: int) -> Built:
        import transformers

        settings = getattr(transformers, f"{kind}Config")(**config)
        module = getattr(transformers, class_name or f"{kind}Model")(settings)
        return module, {"pixel_values": _images(batch)}

    return build


def _whisper_encoder(batch: int) -> Built:
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    settings = transformers.WhisperConfig(
        d_model=512, encoder_layers=6, encoder_attention_heads=8, encoder_ffn_dim=2048
    )
    return WhisperEncoder(settings), {"input_features": torch.randn(batch, 80, 3000)}


def _t5_encoder(batch: int, tokens: int) -> Built:
    import transformers

    settings = transformers.T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32128
    )
    return transformers.T5EncoderModel(settings), _token_ids(32128, batch, tokens)


def _wav2vec2(batch: int, samples: int) -> Built:
    import transformers

    module = transformers.Wav2Vec2Model(transformers.Wav2Vec2Config())
    return module, {"input_values": torch.randn(batch, samples)}


def _timm(name: str) -> Callable[..., Built]:
    def build(batch: int) -> Built:
        import timm

        return timm.create_model(name, pretrained=False), (_images(batch),)

    return build


class DiTBlock(nn.Module):
    """A block of a diffusion transformer with adaptive layer norm (Peebles and Xie, 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: (batch, tokens, width), condition: (batch, width)."""
        batch, tokens, width = x.shape
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[
            :, None
        ].chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = (
            self.qkv(y)
            .view(batch, tokens, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + gate1 * self.out(attended)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """Eight blocks at the width of DiT-XL."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock(1152, 16) for _ in range(8))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: (batch, tokens, 1152), condition: (batch, 1152)."""
        for block in self.blocks:
            x = block(x, condition)
        return x


def _dit(batch: int) -> Built:
    return DiT(), (torch.randn(batch, 256, 1152), torch.randn(batch, 1152))


class VolumeEncoder(nn.Module):
    """The encoder of a network for volumes: 3-D convolutions with instance norm (as in nnU-Net)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 32, 64, 128)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv3d(inputs, outputs, 3, stride=1 if inputs == 1 else 2, padding=1),
                    nn.InstanceNorm3d(outputs, affine=True),
                    nn.LeakyReLU(0.01),
                )
                for inputs, outputs in itertools.pairwise(widths)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, 1, depth, height, width)."""
        return self.stages(x)


def _volumes(batch: int, voxels: int) -> Built:
    return VolumeEncoder(), (torch.randn(batch, 1, voxels, voxels, voxels),)


_BF16, _FP16 = torch.bfloat16, torch.float16
_DEBERTA = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 128100,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
}
_QWEN3 = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "vocab_size": 151936,
}
_GEMMA2 = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
}


def _text_model(
    name: str, build: Callable[..., Built], large_batch: int, large_tokens: int
) -> RealModel:
    large = {"batch": large_batch, "tokens": large_tokens}
    return RealModel(name, "transformers", _BF16, build, {"batch": 1, "tokens": 128}, large)


def _image_model(
    name: str, library: str, half: torch.dtype, build: Callable[..., Built], large_batch: int
) -> RealModel:
    return RealModel(name, library, half, build, {"batch": 1}, {"batch": large_batch})


MODELS: dict[str, RealModel] = {
    model.name: model
    for model in (
        _text_model("bert-base", _encoder("Bert"), 16, 256),
        _text_model("modernbert-base", _encoder("ModernBert"), 8, 512),
        _text_model("deberta-v2", _encoder("DebertaV2", **_DEBERTA), 8, 256),
        _text_model("gpt2", _causal("GPT2"), 4, 512),
        _text_model("llama-4-layers", _causal("Llama", **_LLAMA, num_hidden_layers=4), 2, 1024),
        RealModel(
            "llama-decode",
            "transformers",
            _BF16,
            _llama_decode,
            {"batch": 1, "cached": 512},
            {"batch": 32, "cached": 512},
        ),
        _text_model("qwen3-4-layers", _causal("Qwen3", **_QWEN3), 4, 512),
        _text_model("gemma2-4-layers", _causal("Gemma2", **_GEMMA2), 4, 512),
        _text_model("t5-encoder", _t5_encoder, 8, 512),
        _image_model("whisper-encoder", "transformers", _BF16, _whisper_encoder, 8),
        RealModel(
            "wav2vec2-base",
            "transformers",
            _FP16,
            _wav2vec2,
            {"batch": 1, "samples": 32000},
            {"batch": 8, "samples": 80000},
        ),
        _image_model("vit-base", "transformers", _BF16, _vision("ViT"), 16),
        _image_model("clip-vision", "transformers", _FP16, _vision("CLIPVision"), 32),
        _image_model("dinov2-base", "transformers", _BF16, _vision("Dinov2", image_size=224), 16),
        _image_model("resnet50", "timm", _FP16, _timm("resnet50"), 64),
        _image_model("convnext-tiny", "timm", _BF16, _timm("convnext_tiny"), 32),
        _image_model("swin-tiny", "timm", _BF16, _timm("swin_tiny_patch4_window7_224"), 32),
        _image_model("efficientnet-b0", "timm", _FP16, _timm("efficientnet_b0"), 64),
        _image_model("mixer-b16", "timm", _BF16, _timm("mixer_b16_224"), 32),
        _image_model("dit-blocks", "own", _BF16, _dit, 8),
        RealModel(
            "volume-encoder",
            "own",
            _FP16,
            _volumes,
            {"batch": 1, "voxels": 32},
            {"batch": 4, "voxels": 96},
        ),
    )
}
