"""Tiny transformers models of many architectures, made on the spot: two layers, a width of 32,
weights from a fixed seed.

Each is what `from_pretrained` would give, but small. `ARCHITECTURES` is the list of names; `build`
makes one with its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

BATCH, LENGTH, VOCABULARY, WIDTH = 2, 12, 96, 32
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_DECODER = {
    **_TEXT,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
_VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}
_WHISPER = {
    **_BART,
    "num_mel_bins": 16,
    "max_source_positions": 24,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


@dataclass(frozen=True)
class Architecture:
    """A model in eval mode, and the inputs of one call, with and without a mask (the same where it
    takes none).
    """

    model: torch.nn.Module
    inputs: dict[str, Any]
    masked: dict[str, Any]


@dataclass(frozen=True)
class _Recipe:
    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    mask: str = ""  # the name of its mask


def _ids(rows: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def _text() -> dict[str, Any]:
    return {"input_ids": _ids()}


def _cacheless() -> dict[str, Any]:
    return {"input_ids": _ids(), "use_cache": False}


def _pair() -> dict[str, Any]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(length=6), "use_cache": False}


def _image() -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    }


def _large_image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(2))}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 800, generator=torch.Generator().manual_seed(3))}


def _spectrum() -> dict[str, Any]:
    features = torch.randn(BATCH, 16, 48, generator=torch.Generator().manual_seed(3))
    return {"input_features": features, "decoder_input_ids": _ids(length=6), "use_cache": False}


_CONV = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}
_SAM = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
    "mlp_dim": 64,
    "output_channels": 16,
    "window_size": 2,
    "global_attn_indexes": [1],
}
_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "window_size": 4,
}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [4, 2],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
_DETR_BACKBONE = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}

_RECIPES = {
    "albert": _Recipe(
        "AlbertModel", "AlbertConfig", {**_TEXT, "embedding_size": 16}, _text, "attention_mask"
    ),
    "bart": _Recipe("BartModel", "BartConfig", _BART, _pair, "attention_mask"),
    "bert": _Recipe("BertModel", "BertConfig", _TEXT, _text, "attention_mask"),
    "bloom": _Recipe(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4},
        _cacheless,
        "attention_mask",
    ),
    "clip_text": _Recipe(
        "CLIPTextModel",
        "CLIPTextConfig",
        {**_TEXT, "max_position_embeddings": 32},
        _text,
        "attention_mask",
    ),
    "clip_vision": _Recipe("CLIPVisionModel", "CLIPVisionConfig", _VISION, _image),
    "convnext": _Recipe(
        "ConvNextModel",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
        _image,
    ),
    "deberta_v2": _Recipe(
        "DebertaV2Model",
        "DebertaV2Config",
        {
            **_TEXT,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "max_relative_positions": 16,
        },
        _text,
        "attention_mask",
    ),
    "detr": _Recipe(
        "DetrModel",
        "DetrConfig",
        {
            "num_queries": 5,
            "d_model": WIDTH,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        },
        _large_image,
    ),
    "dinov2": _Recipe("Dinov2Model", "Dinov2Config", {**_VISION, "mlp_ratio": 2}, _image),
    "dinov3": _Recipe("DINOv3ViTModel", "DINOv3ViTConfig", _VISION, _image),
    "distilbert": _Recipe(
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        _text,
        "attention_mask",
    ),
    "electra": _Recipe(
        "ElectraModel", "ElectraConfig", {**_TEXT, "embedding_size": 16}, _text, "attention_mask"
    ),
    "falcon": _Recipe(
        "FalconForCausalLM",
        "FalconConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        _cacheless,
        "attention_mask",
    ),
    "gemma2": _Recipe(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_DECODER, "head_dim": 8, "sliding_window": 8},
        _cacheless,
        "attention_mask",
    ),
    "gemma3": _Recipe(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_DECODER, "head_dim": 8, "sliding_window": 8},
        _cacheless,
        "attention_mask",
    ),
    "gpt2": _Recipe("GPT2LMHeadModel", "GPT2Config", _GPT, _cacheless, "attention_mask"),
    "gpt_neox": _Recipe(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_TEXT, "max_position_embeddings": 64},
        _cacheless,
        "attention_mask",
    ),
    "granite": _Recipe(
        "GraniteForCausalLM", "GraniteConfig", _DECODER, _cacheless, "attention_mask"
    ),
    "llama": _Recipe("LlamaForCausalLM", "LlamaConfig", _DECODER, _cacheless, "attention_mask"),
    "mamba": _Recipe("MambaForCausalLM", "MambaConfig", _MAMBA, _cacheless),
    "mamba2": _Recipe(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**_MAMBA, "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
        _cacheless,
    ),
    "mistral": _Recipe(
        "MistralForCausalLM",
        "MistralConfig",
        {**_DECODER, "sliding_window": 8},
        _cacheless,
        "attention_mask",
    ),
    "mixtral": _Recipe(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_DECODER, "num_local_experts": 4},
        _cacheless,
        "attention_mask",
    ),
    "modernbert": _Recipe(
        "ModernBertModel",
        "ModernBertConfig",
        {
            **_TEXT,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
            "reference_compile": False,
        },
        _text,
        "attention_mask",
    ),
    "mpnet": _Recipe("MPNetModel", "MPNetConfig", _TEXT, _text, "attention_mask"),
    "olmo2": _Recipe("Olmo2ForCausalLM", "Olmo2Config", _DECODER, _cacheless, "attention_mask"),
    "opt": _Recipe(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": WIDTH,
        },
        _cacheless,
        "attention_mask",
    ),
    "phi": _Recipe(
        "PhiForCausalLM",
        "PhiConfig",
        {**_TEXT, "max_position_embeddings": 64},
        _cacheless,
        "attention_mask",
    ),
    "phi3": _Recipe("Phi3ForCausalLM", "Phi3Config", _DECODER, _cacheless, "attention_mask"),
    "qwen2": _Recipe("Qwen2ForCausalLM", "Qwen2Config", _DECODER, _cacheless, "attention_mask"),
    "qwen2_moe": _Recipe(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**_DECODER, **_MOE}, _cacheless, "attention_mask"
    ),
    "qwen3": _Recipe(
        "Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}, _cacheless, "attention_mask"
    ),
    "roberta": _Recipe(
        "RobertaModel",
        "RobertaConfig",
        {**_TEXT, "max_position_embeddings": 64},
        _text,
        "attention_mask",
    ),
    "sam_vision": _Recipe("SamVisionModel", "SamVisionConfig", _SAM, _large_image),
    "segformer": _Recipe("SegformerModel", "SegformerConfig", _SEGFORMER, _image),
    "siglip": _Recipe("SiglipVisionModel", "SiglipVisionConfig", _VISION, _image),
    "starcoder2": _Recipe(
        "Starcoder2ForCausalLM", "Starcoder2Config", _DECODER, _cacheless, "attention_mask"
    ),
    "swin": _Recipe("SwinModel", "SwinConfig", _SWIN, _image),
    "t5": _Recipe("T5Model", "T5Config", _T5, _pair, "attention_mask"),
    "t5_encoder": _Recipe("T5EncoderModel", "T5Config", _T5, _text, "attention_mask"),
    "vit": _Recipe("ViTModel", "ViTConfig", _VISION, _image),
    "wav2vec2": _Recipe("Wav2Vec2Model", "Wav2Vec2Config", {**_TEXT, **_CONV}, _sound),
    "whisper": _Recipe("WhisperModel", "WhisperConfig", _WHISPER, _spectrum),
}
ARCHITECTURES = tuple(_RECIPES)


def build(name: str) -> Architecture:
    """The model of that name, with weights from a fixed seed."""
    recipe = _RECIPES[name]
    options = dict(recipe.options)
    if name == "detr":
        options |= {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": transformers.ResNetConfig(**_DETR_BACKBONE, out_features=["stage4"]),
        }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, recipe.model)(
            getattr(transformers, recipe.config)(**options)
        ).eval()
    inputs = recipe.inputs()
    masked = dict(inputs)
    if recipe.mask:
        mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        mask[1, -4:] = 0
        masked[recipe.mask] = mask
    return Architecture(model, inputs, masked)


# Models of timm, by their names there; small images. timm needs torchvision, which has no build
# beside the CPU torch of the tests.
TIMM = (
    "resnet18", "resnetv2_50", "regnety_002", "efficientnet_b0", "mobilenetv3_small_100", "convnext_atto", "densenet121",
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "coat_tiny", "poolformer_s12",
    "edgenext_xx_small", "beit_base_patch16_224", "levit_128s",
)  # fmt: skip


def build_timm(name: str, device: torch.device) -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    """The model of that name with weights from a fixed seed in eval mode, and two images for it."""
    import timm

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False).eval().to(device)
        return model, (torch.randn(2, 3, 224, 224, device=device),)
