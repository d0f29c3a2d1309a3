"""Programs of models with layers that repeat, made on the spot."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Region

WIDTH, ROWS = 8, 6


class Layer(nn.Module):
    """A residual layer with a norm in front, as most transformers have them."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def make_stack(layers: int, hidden: int = 12) -> nn.Sequential:
    """That many layers between an embedding and a head."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(Layer(hidden) for _ in range(layers)), nn.Linear(WIDTH, 3)
    ).eval()


def capture_region(module: nn.Module, *inputs: Tensor, **keywords: Tensor | bool) -> Region:
    """The region of one inference call."""
    with torch.no_grad():
        (region,) = capture_regions(module, inputs, keywords)
    return region


def capture_stack(layers: int, hidden: int = 12) -> Program:
    """The Program of `make_stack`."""
    return capture_region(make_stack(layers, hidden), torch.randn(ROWS, WIDTH)).program


def capture_transformer(kind: str, layers: int) -> Program:
    """The Program of a tiny model of the transformers library: "bert", "llama", with a head
    "llama with a head", or "vit".
    """
    shared = {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    text = {**shared, "vocab_size": 48, "max_position_embeddings": 32}
    ids = torch.randint(1, 48, (2, 8))
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(**text))
        return capture_region(model.eval(), input_ids=ids).program
    if kind == "vit":
        config = transformers.ViTConfig(**shared, image_size=16, patch_size=8)
        pixels = torch.randn(2, 3, 16, 16)
        return capture_region(transformers.ViTModel(config).eval(), pixel_values=pixels).program
    config = transformers.LlamaConfig(**text, num_key_value_heads=2, pad_token_id=0)
    kinds = {"llama": transformers.LlamaModel, "llama with a head": transformers.LlamaForCausalLM}
    return capture_region(kinds[kind](config).eval(), input_ids=ids, use_cache=False).program
