"""The floor of a model's call: what its products and its bytes take at the rates that this device
reaches, whichever is more.

The rates are measured in the same process: a large product of PyTorch's, and a copy. No kernel of
any kind gets below it by much; how near one comes says what is left to gain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_cudal1.ir.cost import make_flop_counter

__all__ = ["DeviceRates", "ModelWork", "count_model_work", "find_floor_us", "measure_rates"]

# Of the product and the copy that rates are measured with. A CPU takes minutes for those of a GPU.
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
_REPEATS = 10  # the fastest counts: a rate is what the device reaches


@dataclass(frozen=True)
class ModelWork:
    """FLOPs of a call's products, convolutions and attention, and the bytes that it has to move:
    weights, inputs and results, each once.
    """

    flops: float
    moved_bytes: int


@dataclass(frozen=True)
class DeviceRates:
    """FLOP/s that products reach in one dtype, and bytes/s that a copy reads and writes."""

    flops_per_s: float
    bytes_per_s: float


def count_model_work(
    module: nn.Module, positional: Sequence[Any], named: Mapping[str, Any]
) -> ModelWork:
    """The work of `module(*positional, **named)`, which runs once.

    Of a table of embeddings that nothing else reads, a call reads some rows: it is left out.
    """
    counter = make_flop_counter()
    with torch.no_grad(), counter:
        result = module(*positional, **named)
    weight_bytes: dict[int, int] = {}
    for part in module.modules():
        for weight in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if not isinstance(part, nn.Embedding):
                weight_bytes[weight.data_ptr()] = weight.numel() * weight.element_size()
    ends = [
        leaf
        for leaf in pytree.tree_leaves((list(positional), dict(named), _list_values(result)))
        if isinstance(leaf, Tensor)
    ]
    end_bytes = sum(leaf.numel() * leaf.element_size() for leaf in ends)
    return ModelWork(float(counter.get_total_flops()), sum(weight_bytes.values()) + end_bytes)


def _list_values(result: Any) -> Any:
    # A ModelOutput is a mapping, and a leaf to those who do not know the class.
    return list(result.values()) if isinstance(result, Mapping) else result


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """What a large product and a large copy reach on the device."""
    size = _PRODUCT_SIZE[device.type]
    left, right = torch.randn(2, size, size, device=device, dtype=dtype)
    source = torch.zeros(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s = _time_fastest(lambda: left @ right, device)
    copy_s = _time_fastest(lambda: target.copy_(source), device)
    return DeviceRates(2 * size**3 / product_s, 2 * source.numel() / copy_s)


def find_floor_us(work: ModelWork, rates: DeviceRates) -> float:
    """Microseconds of the products or of the bytes, whichever takes longer."""
    return 1e6 * max(work.flops / rates.flops_per_s, work.moved_bytes / rates.bytes_per_s)


def _time_fastest(call: Any, device: torch.device) -> float:
    """Seconds of the fastest of some calls, the first one left out."""
    durations_s = []
    for _ in range(_REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations_s.append(time.perf_counter() - begin)
    return min(durations_s[1:])
