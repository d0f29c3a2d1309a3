"""The one input maker: tensors of a region's exact form, filled from a seed and a distribution.

Parameters are drawn away from their initial values, integers stay where their consumers can read them. It does not know the
candidate, and it draws no seed itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_cudal1.judge.analysis import Facts, analyse
from torch_cudal1.judge.channel import storage_extent
from torch_cudal1.program.model import TensorSpec
from torch_cudal1.records import Region, Role

__all__ = ["DISTRIBUTIONS", "clone_strided", "make_inputs", "unproven_integers"]

DISTRIBUTIONS: dict[str, tuple[float, float]] = {  # of floating inputs that are no parameters: mean and standard deviation
    "normal": (0.0, 1.0),
    "shifted": (3.0, 1.0),  # zero-mean inputs hide wrong means and one-pass variances
    "uniform": (0.5, math.sqrt(1 / 12)),
    "large": (0.0, 1e4),
    "small": (0.0, 1e-4),
}
_HALF_LARGE = 1e2  # float16 ends at 65,504
_UNBOUNDED_INTEGERS = 2


def make_inputs(
    region: Region,
    seed: int,
    distribution: str,
    device: torch.device,
    *,
    examples: Sequence[torch.Tensor] | None = None,
    facts: Facts | None = None,
) -> list[torch.Tensor]:
    """One tensor per input of the region, with its exact dtype, shape and strides; the same for the same seed and device.

    Integers and booleans are those of `examples` where given (real values are always legal), else drawn within the bounds that the
    Program's consumers imply. Raises ValueError for an unknown distribution or examples that do not fit.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution {distribution!r}; expected one of {sorted(DISTRIBUTIONS)}")
    specs = region.program.inputs
    if examples is not None and [TensorSpec.of(t) for t in examples] != list(specs):
        raise ValueError("the examples do not have the dtypes, shapes and strides of the region's inputs")
    known = analyse(region.program) if facts is None else facts
    tensors = []
    for index, (spec, role) in enumerate(zip(specs, region.roles, strict=True)):
        place = device if spec.device == device.type else torch.device(spec.device)
        generator = torch.Generator(place).manual_seed((seed * 1_000_003 + index) % (1 << 63))
        if examples is not None and not (spec.torch_dtype.is_floating_point or spec.torch_dtype.is_complex):
            tensors.append(clone_strided(examples[index]).to(place))
            continue
        flat = _draw(spec, role, distribution, generator, index in known.positive, known.bounds.get(index))
        tensors.append(flat.as_strided(spec.shape, spec.strides))
    return tensors


def unproven_integers(region: Region, facts: Facts) -> tuple[int, ...]:
    """Positions of integer inputs whose legal range the Program does not tell (booleans and empty ones apart)."""
    return tuple(
        index
        for index, spec in enumerate(region.program.inputs)
        if _is_integer(spec.torch_dtype) and spec.numel and index not in facts.bounds
    )


def clone_strided(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in its own storage with the same strides, overlapping ones included."""
    extent = storage_extent(tensor.shape, tensor.stride())
    flat = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _draw(
    spec: TensorSpec, role: Role, distribution: str, generator: torch.Generator, positive: bool, bound: int | None
) -> torch.Tensor:
    """The flat storage of one input."""
    dtype, extent, device = spec.torch_dtype, storage_extent(spec.shape, spec.strides), generator.device
    if dtype == torch.bool:
        return torch.rand(extent, generator=generator, device=device) < 0.5
    if _is_integer(dtype):
        high = max(1, _UNBOUNDED_INTEGERS if bound is None else min(bound, torch.iinfo(dtype).max))
        return torch.randint(high, (extent,), generator=generator, device=device).to(dtype)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    if positive:
        return (torch.rand(extent, generator=generator, device=device) * 1.5 + 0.5).to(dtype)  # variances: U(0.5, 2)
    noise = torch.randn(extent, generator=generator, device=device, dtype=wide)
    if role != "input":
        return _parameter(noise, spec).to(dtype)
    if distribution == "uniform" and not dtype.is_complex:
        return torch.rand(extent, generator=generator, device=device).to(dtype)
    mean, deviation = DISTRIBUTIONS[distribution]
    return (noise * (min(deviation, _HALF_LARGE) if dtype == torch.float16 else deviation) + mean).to(dtype)


def _parameter(noise: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Weights keep the scale of activations (fan-in); vectors are neither 0 nor 1, so gains and biases show."""
    if len(spec.shape) >= 2:
        fan_in = max(1, spec.numel // max(1, spec.shape[0]))
        return noise / math.sqrt(fan_in)
    return noise * 0.5 + 0.5
