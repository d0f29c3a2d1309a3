"""The one input maker: tensors of a region's exact form, filled from a seed and a distribution.

Parameters are drawn away from their initial values, integers stay where their consumers can read
them. It does not know the candidate, and it draws no seed itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.ir.records import Role
from torch_cudal1.judge.reference.analysis import Facts
from torch_cudal1.judge.wire.channel import storage_extent

__all__ = ["DISTRIBUTIONS", "InputForm", "clone_strided", "find_unproven_integers", "make_inputs"]

DISTRIBUTIONS: dict[
    str, tuple[float, float]
] = {  # of floating inputs that are no parameters: mean and standard deviation
    "normal": (0.0, 1.0),
    "shifted": (3.0, 1.0),  # zero-mean inputs hide wrong means and one-pass variances
    "uniform": (0.5, math.sqrt(1 / 12)),
    "large": (0.0, 1e4),
    "small": (0.0, 1e-4),
    "log_uniform": (0.0, 1e5),  # 1e-6 to 1e6 with a random sign
    "thousand": (1e3, 1.0),
    "impulse": (0.0, 1.0),  # zero but for one element, the last one every other time
    "constant_rows": (0.0, 1.0),
    "sorted": (0.0, 1.0),
    "sparse": (0.0, 1.0),  # 90 % zeros
    "integers": (
        0.0,
        1.0,
    ),  # zeros and ones, parameters too, few enough ones that sums of products stay exact
}
_HALF_LARGE = 1e2  # float16 ends at 65,504
_EXACT_SUM = 1_000  # float16 counts exactly to 2,048
_UNBOUNDED_INTEGERS = 2


class InputForm(Protocol):
    """What input making needs to know: one spec and one role per input, and what the consumers
    imply.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def roles(self) -> tuple[Role, ...]: ...
    @property
    def facts(self) -> Facts: ...


def make_inputs(
    form: InputForm,
    seed: int,
    distribution: str,
    device: torch.device,
    *,
    examples: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """One tensor per input, with its exact dtype, shape and strides; the same for the same seed and
    device.

    Integers and booleans are those of `examples` where one is given (real values are always legal),
    else drawn within the bounds that the Program's consumers imply. Raises ValueError for an
    unknown distribution or examples that do not fit.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution {distribution!r}; expected one of {sorted(DISTRIBUTIONS)}")
    specs = form.specs
    if examples is not None and not _fits_specs(examples, specs):
        raise ValueError(
            "the examples do not have the dtypes, shapes and strides of the region's inputs"
        )
    facts = form.facts
    tensors = []
    # A spec names the type of a device, and `device` its index.
    for index, (spec, role) in enumerate(zip(specs, form.roles, strict=True)):
        place = device if spec.device == device.type else torch.device(spec.device)
        # A generator for each input: the draws of one do not depend on the size of another.
        # `manual_seed` takes 64 bits with a sign.
        generator = torch.Generator(place).manual_seed((seed * 1_000_003 + index) % (1 << 63))
        example = examples[index] if examples is not None else None
        floating = spec.torch_dtype.is_floating_point or spec.torch_dtype.is_complex
        # Weights of recurrent layers that come as inputs: drawn as large as activations, each step
        # would multiply all rounding.
        role = "parameter" if index in facts.weights else role
        # Real integers are legal, and masks are structure: a random mask may leave rows without any
        # key.
        if example is not None and (not floating or index in facts.structural):
            tensors.append(clone_strided(example).to(place))
            continue
        # The whole storage is filled, gaps between strides included.
        flat = _draw(
            spec, role, distribution, generator, index in facts.positive, facts.bounds.get(index)
        )
        tensor = flat.as_strided(spec.shape, spec.strides)
        # Parameters keep the scale of a model, whatever the distribution of activations.
        if floating and role == "input":
            _shape_in_place(tensor, distribution, generator)
        # A variance of 0 divides by zero.
        if distribution == "integers" and floating and index not in facts.positive:
            _count_in_place(flat, facts.longest_reduction, generator)
        tensors.append(tensor)
    return tensors


def _fits_specs(examples: Sequence[torch.Tensor | None], specs: Sequence[TensorSpec]) -> bool:
    return len(examples) == len(specs) and all(
        t is None or TensorSpec.of(t) == s for t, s in zip(examples, specs, strict=True)
    )


def find_unproven_integers(form: InputForm) -> tuple[int, ...]:
    """Positions of integer inputs whose legal range the consumers do not tell (booleans and empty
    ones apart).
    """
    return tuple(
        index
        for index, spec in enumerate(form.specs)
        if _is_integer(spec.torch_dtype) and spec.numel and index not in form.facts.bounds
    )


def clone_strided(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in its own storage with the same strides, overlapping ones included."""
    extent = storage_extent(tensor.shape, tensor.stride())
    # Elements that share memory go on sharing it; `clone` would take them apart or pack the
    # strides.
    flat = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride())


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _draw(
    spec: TensorSpec,
    role: Role,
    distribution: str,
    generator: torch.Generator,
    positive: bool,
    bound: int | None,
) -> torch.Tensor:
    """The flat storage of one input."""
    dtype, extent, device = (
        spec.torch_dtype,
        storage_extent(spec.shape, spec.strides),
        generator.device,
    )
    if dtype == torch.bool:
        return torch.rand(extent, generator=generator, device=device) < 0.5
    if _is_integer(dtype):
        # 0 and 1 are legal for nearly every consumer whose bound is not known.
        high = max(1, _UNBOUNDED_INTEGERS if bound is None else min(bound, torch.iinfo(dtype).max))
        return torch.randint(high, (extent,), generator=generator, device=device).to(dtype)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    # Variances and what is divided by: away from 0.
    if positive:
        return (torch.rand(extent, generator=generator, device=device) * 1.5 + 0.5).to(
            dtype
        )  # variances: U(0.5, 2)
    noise = torch.randn(extent, generator=generator, device=device, dtype=wide)
    # Never at their initial values: a gain of 1 or a bias of 0 hides a kernel that leaves it out.
    if role != "input":
        return _scale_parameter(noise, spec).to(dtype)
    if distribution == "uniform" and not dtype.is_complex:
        return torch.rand(extent, generator=generator, device=device).to(dtype)
    mean, deviation = DISTRIBUTIONS[distribution]
    return (
        # Products of two numbers of 1e4 are beyond float16.
        noise * (min(deviation, _HALF_LARGE) if dtype == torch.float16 else deviation) + mean
    ).to(dtype)


def _shape_in_place(tensor: torch.Tensor, distribution: str, generator: torch.Generator) -> None:
    """Give noise the structure that a distribution's name says; a tensor whose elements share
    memory stays noise.
    """
    # An element of an expanded tensor is many elements at once.
    if not tensor.numel() or not tensor.dim() or 0 in tensor.stride():
        return
    if distribution == "log_uniform":
        # float16 ends at 65,504 and has no normal numbers below 6e-5.
        low, high = (-3.0, 2.0) if tensor.dtype == torch.float16 else (-6.0, 6.0)
        exponent = (
            torch.rand(tensor.shape, generator=generator, device=generator.device) * (high - low)
            + low
        )
        tensor.copy_(torch.sgn(tensor) * 10.0**exponent)
    elif distribution == "impulse":
        # A draw past the end means the last element: a recurrence that ignores its last step shows
        # there.
        drawn = int(
            torch.randint(2 * tensor.numel(), (1,), generator=generator, device=generator.device)
        )
        place = min(drawn, tensor.numel() - 1)
        tensor.zero_()
        tensor[tuple(int(i) for i in torch.unravel_index(torch.tensor(place), tensor.shape))] = 16.0
    elif distribution == "constant_rows":
        tensor.copy_(tensor[..., :1].clone().expand_as(tensor))
    elif distribution == "sorted" and not tensor.dtype.is_complex:
        tensor.copy_(tensor.sort(-1).values)
    elif distribution == "sparse":
        tensor.mul_(
            (torch.rand(tensor.shape, generator=generator, device=generator.device) < 0.1).to(
                tensor.dtype
            )
        )


def _count_in_place(flat: torch.Tensor, longest: int, generator: torch.Generator) -> None:
    """Zeros and ones. Both factors of a product are drawn so: a fraction p of ones leaves p * p of
    a sum.
    """
    # Sums stay below what float16 counts exactly, so a linear operator must be exact (after
    # CUDA-L2's test).
    part = min(0.5, math.sqrt(_EXACT_SUM / max(longest, 1)))
    flat.copy_(torch.rand(flat.shape, generator=generator, device=generator.device) < part)


def _scale_parameter(noise: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Weights keep the scale of activations (fan-in); vectors are neither 0 nor 1, so gains and
    biases show.
    """
    if len(spec.shape) >= 2:
        fan_in = max(1, spec.numel // max(1, spec.shape[0]))
        # A product keeps the scale of its input, also through many layers.
        return noise / math.sqrt(fan_in)
    return noise * 0.5 + 0.5
