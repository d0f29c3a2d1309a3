"""The workloads of every benchmark: real models with random weights, their inputs, and the loss of
one training step.

A factory takes `sizes` ("full" for a GPU, "small" for seconds on a CPU), `device`, `dtype` and
`batch`, and returns `(module, inputs)`, so that it is also a TARGET for the command line
(`benchmarks.models:resnet50`). `build` adds the loss. It does not include tokenizer, data loader or
optimizer. Weights are random but never at their initial values: a gain of one or a bias of zero
would hide a parameter that a wrong kernel drops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.nets import Bert, FeedForward, Llama, Lstm, ResNet, UNet, ViT

__all__ = ["MODELS", "Sizes", "Workload", "build", "draw_inputs"]

Sizes: TypeAlias = Literal["full", "small"]
Inputs: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """A module, one set of valid inputs, and the loss of a training step as a function of the
    module's output.
    """

    name: str
    module: nn.Module
    inputs: Inputs
    loss: Callable[[Tensor], Tensor]


_SHAPES: Mapping[str, Mapping[Sizes, Mapping[str, Any]]] = {
    "resnet50": {
        "full": {"batch": 16, "image": 224, "depths": (3, 4, 6, 3), "width": 64, "classes": 1000},
        "small": {"batch": 2, "image": 64, "depths": (1, 1, 1, 1), "width": 8, "classes": 10},
    },
    "vit_b16": {
        "full": {
            "batch": 8,
            "image": 224,
            "patch": 16,
            "hidden": 768,
            "layers": 12,
            "heads": 12,
            "classes": 1000,
        },
        "small": {
            "batch": 2,
            "image": 32,
            "patch": 16,
            "hidden": 32,
            "layers": 2,
            "heads": 2,
            "classes": 10,
        },
    },
    "bert_base": {
        "full": {
            "batch": 8,
            "length": 128,
            "vocabulary": 30522,
            "hidden": 768,
            "layers": 12,
            "heads": 12,
            "classes": 9,
        },
        "small": {
            "batch": 2,
            "length": 16,
            "vocabulary": 64,
            "hidden": 32,
            "layers": 2,
            "heads": 2,
            "classes": 9,
        },
    },
    "llama": {
        "full": {
            "batch": 2,
            "length": 512,
            "hidden": 2048,
            "layers": 4,
            "heads": 32,
            "kv_heads": 8,
            "inner": 8192,
        },
        "small": {
            "batch": 2,
            "length": 16,
            "hidden": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "inner": 64,
        },
    },
    "feed_forward": {
        "full": {"batch": 8, "length": 512, "hidden": 1024, "inner": 4096, "layers": 2},
        "small": {"batch": 2, "length": 16, "hidden": 32, "inner": 64, "layers": 2},
    },
    "lstm": {
        "full": {
            "batch": 32,
            "length": 64,
            "features": 256,
            "hidden": 512,
            "layers": 2,
            "classes": 128,
        },
        "small": {"batch": 2, "length": 8, "features": 8, "hidden": 16, "layers": 2, "classes": 8},
    },
    "unet": {
        "full": {"batch": 8, "image": 128, "width": 64, "levels": 4, "classes": 4},
        "small": {"batch": 2, "image": 32, "width": 8, "levels": 3, "classes": 4},
    },
}


def _shape(name: str, sizes: Sizes, batch: int | None) -> dict[str, Any]:
    """The sizes of one model, `batch` replaced when given. Raises ValueError for unknown sizes."""
    if sizes not in _SHAPES[name]:
        raise ValueError(f"sizes is {sizes!r}; expected 'full' or 'small'")
    return {**_SHAPES[name][sizes], **({} if batch is None else {"batch": batch})}


def _device(device: str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _randomise(module: nn.Module) -> None:
    """Move every parameter and statistic away from its initial value (He initialisation for
    convolutions).
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        if (
            isinstance(layer, nn.BatchNorm2d)
            and layer.running_mean is not None
            and layer.running_var is not None
        ):
            layer.running_mean.normal_(0.0, 0.3)
            layer.running_var.uniform_(0.5, 2.0)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            bias = name.rsplit(".", 1)[-1].startswith("bias")
            nn.init.normal_(parameter, 0.0 if bias else 1.0, 0.3)


def _build_on_device(
    make: Callable[[], tuple[nn.Module, Tensor]], device: str | None, dtype: torch.dtype
) -> tuple[nn.Module, Inputs]:
    """Build on the device with seed 0, in eval mode, floats in `dtype`."""
    with torch.random.fork_rng(), torch.device(_device(device)):
        torch.manual_seed(0)
        module, example = make()
        _randomise(module)
    example = example.to(dtype) if example.is_floating_point() else example
    return module.to(dtype).eval(), (example,)


def resnet50(
    sizes: Sizes = "full",
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
) -> tuple[nn.Module, Inputs]:
    """ResNet-50 on 16 images of 224 x 224."""
    s = _shape("resnet50", sizes, batch)
    images = s["batch"], 3, s["image"], s["image"]
    return _build_on_device(
        lambda: (ResNet(s["depths"], s["width"], s["classes"]), torch.randn(images)), device, dtype
    )


def vit_b16(
    sizes: Sizes = "full",
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
) -> tuple[nn.Module, Inputs]:
    """ViT-B/16 on 8 images of 224 x 224."""
    s = _shape("vit_b16", sizes, batch)
    images = s["batch"], 3, s["image"], s["image"]
    arguments = s["image"], s["patch"], s["hidden"], s["layers"], s["heads"], s["classes"]
    return _build_on_device(lambda: (ViT(*arguments), torch.randn(images)), device, dtype)


def bert_base(
    sizes: Sizes = "full",
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
) -> tuple[nn.Module, Inputs]:
    """BERT-base with a token classifier on 8 sequences of 128 tokens (int64)."""
    s = _shape("bert_base", sizes, batch)
    arguments = s["vocabulary"], 4 * s["length"], s["hidden"], s["layers"], s["heads"], s["classes"]
    return _build_on_device(
        lambda: (Bert(*arguments), torch.randint(s["vocabulary"], (s["batch"], s["length"]))),
        device,
        dtype,
    )


def bert_base_b1(
    sizes: Sizes = "full",
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int | None = 1,
) -> tuple[nn.Module, Inputs]:
    """BERT-base on one sequence: bound by launches and host time, not by the device."""
    return bert_base(sizes, device, dtype, batch)


def llama(
    sizes: Sizes = "full",
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
) -> tuple[nn.Module, Inputs]:
    """Four Llama blocks (the widths of a 1B model) on 2 sequences of 512 hidden states."""
    s = _shape("llama", sizes, batch)
    arguments = s["hidden"], s["layers"], s["heads"], s["kv_heads"], s["inner"], s["length"]
    return _build_on_device(
        lambda: (Llama(*arguments), torch.randn(s["batch"], s["length"], s["hidden"])),
        device,
        dtype,
    )


def feed_forward(
    sizes: Sizes = "full",
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
) -> tuple[nn.Module, Inputs]:
    """The feed-forward halves of two transformer layers, 1024 to 4096 and back, on 8 sequences of
    512 hidden states.
    """
    s = _shape("feed_forward", sizes, batch)
    arguments = s["hidden"], s["inner"], s["layers"]
    return _build_on_device(
        lambda: (FeedForward(*arguments), torch.randn(s["batch"], s["length"], s["hidden"])),
        device,
        dtype,
    )


def lstm(
    sizes: Sizes = "full",
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
) -> tuple[nn.Module, Inputs]:
    """A two-layer LSTM, hidden 512, on 32 sequences of 64 steps."""
    s = _shape("lstm", sizes, batch)
    arguments = s["features"], s["hidden"], s["layers"], s["classes"]
    return _build_on_device(
        lambda: (Lstm(*arguments), torch.randn(s["batch"], s["length"], s["features"])),
        device,
        dtype,
    )


def unet(
    sizes: Sizes = "full",
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int | None = None,
) -> tuple[nn.Module, Inputs]:
    """A four-level U-Net on 8 images of 128 x 128."""
    s = _shape("unet", sizes, batch)
    images = s["batch"], 3, s["image"], s["image"]
    return _build_on_device(
        lambda: (UNet(s["width"], s["levels"], s["classes"]), torch.randn(images)), device, dtype
    )


def _make_cross_entropy(classes_at: int) -> Callable[[Tensor], Tensor]:
    """Cross entropy against fixed labels; the classes lie along dimension `classes_at` of the
    output.
    """
    labels: dict[torch.Size, Tensor] = {}

    def loss(logits: Tensor) -> Tensor:
        logits = logits.movedim(classes_at, 1)
        shape = logits.shape[:1] + logits.shape[2:]
        if shape not in labels:
            labels[shape] = (
                torch.arange(math.prod(shape), device=logits.device).reshape(shape)
                % logits.shape[1]
            )
        return F.cross_entropy(logits, labels[shape])

    return loss


def _mean_square(states: Tensor) -> Tensor:
    """A regression loss for hidden states."""
    return (states - 1.0).square().mean()


def _make_bfloat16_factory(factory: _Factory) -> _Factory:
    """The model as it is served: its attention is another operator than that of fp32."""
    return lambda sizes, device, dtype: factory(sizes, device, torch.bfloat16)


_Factory: TypeAlias = Callable[[Sizes, "str | None", torch.dtype], tuple[nn.Module, Inputs]]
# Cheapest to compile first: a run that is killed has measured the most models.
_TABLE: Mapping[str, tuple[_Factory, Callable[[], Callable[[Tensor], Tensor]]]] = {
    "feed_forward": (feed_forward, lambda: _mean_square),
    "lstm": (lstm, lambda: _make_cross_entropy(1)),
    "llama": (llama, lambda: _mean_square),
    "llama_bf16": (_make_bfloat16_factory(llama), lambda: _mean_square),
    "bert_base_bf16": (_make_bfloat16_factory(bert_base), lambda: _make_cross_entropy(-1)),
    "bert_base_b1": (bert_base_b1, lambda: _make_cross_entropy(-1)),
    "bert_base": (bert_base, lambda: _make_cross_entropy(-1)),
    "vit_b16": (vit_b16, lambda: _make_cross_entropy(1)),
    "unet": (unet, lambda: _make_cross_entropy(1)),
    "resnet50": (resnet50, lambda: _make_cross_entropy(1)),
}
MODELS: tuple[str, ...] = tuple(_TABLE)


def build(
    name: str,
    *,
    sizes: Sizes = "full",
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """The named model with its inputs and loss. Raises ValueError for an unknown name or sizes."""
    if name not in _TABLE:
        raise ValueError(f"no model {name!r}; expected one of {', '.join(MODELS)}")
    factory, loss = _TABLE[name]
    module, inputs = factory(sizes, device, dtype)
    return Workload(name, module, inputs, loss())


def draw_inputs(inputs: Inputs, seed: int) -> Inputs:
    """New random inputs of the same form: floats N(0, 1); integers uniform over the range seen in
    `inputs` (valid token ids).
    """
    tensors = []
    for tensor in inputs:
        generator = torch.Generator(tensor.device).manual_seed(seed)
        if tensor.is_floating_point():
            tensors.append(
                torch.randn(
                    tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype
                )
            )
        else:
            high = int(tensor.max()) + 1
            tensors.append(
                torch.randint(
                    high,
                    tensor.shape,
                    generator=generator,
                    device=tensor.device,
                    dtype=tensor.dtype,
                )
            )
    return tuple(tensors)
