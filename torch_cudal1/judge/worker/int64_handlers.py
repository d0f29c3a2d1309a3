"""RPC handler of the check of 64-bit indexing: generates inputs of over 2^31 elements from a seed,
and answers pieces of the outputs.

Two processes on the same kind of device make the same numbers from the same seed, so the parent can
compare pieces of the candidate's outputs with eager's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torch_cudal1.judge.benchmark.clock import synchronise
from torch_cudal1.judge.wire.channel import storage_extent
from torch_cudal1.judge.wire.properties import describe
from torch_cudal1.judge.worker.raw_copy import refuse_lazy, save_raw_tensors

if TYPE_CHECKING:
    from torch_cudal1.judge.worker.session import Session

__all__ = ["HANDLERS", "PIECE_ELEMENTS", "generate_tensor"]

# Of an output: gigabytes do not travel.
PIECE_ELEMENTS = 4096


def generate_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int, bound: int | None
) -> torch.Tensor:
    """Standard normal floats, integers from 0 below `bound` (2 if None), or booleans."""
    generator = torch.Generator(device).manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)
    # Integers may be indices, which must stay below the bound.
    high = 2 if dtype == torch.bool or bound is None else min(bound, torch.iinfo(dtype).max)
    return torch.randint(max(1, high), shape, generator=generator, device=device, dtype=dtype)


def _run_large(session: Session, request: Mapping[str, Any]) -> dict[str, Any]:
    """Call a slot on an input set in which the tensors of `grown` ([position, shape, bound]) are
    generated from `seed`.

    Answers the outputs' properties, and pieces of each output's memory, which begin at the
    fractions `pieces` of the whole.
    """
    inputs = list(session.sets[request["inputs"]])
    outputs: list[torch.Tensor | None] = []
    try:
        for index, shape, bound in request["grown"]:
            inputs[index] = generate_tensor(
                shape,
                inputs[index].dtype,
                inputs[index].device,
                int(request["seed"]) + index,
                bound,
            )
        with torch.no_grad():
            outputs = session.slots[request["slot"]](inputs)
        refuse_lazy(outputs)
        synchronise(session.device)
        pieces = [
            piece
            for out in outputs
            if out is not None
            for piece in _cut_pieces(out, request["pieces"])
        ]
        layout = save_raw_tensors(pieces, Path(request["path"]))
        return {"layout": layout, "facts": describe(outputs, inputs, [])}
    finally:
        # Before the answer leaves: the reference's process needs as much memory of the same GPU.
        outputs.clear()
        inputs.clear()
        gc.collect()
        if session.device.type == "cuda":
            torch.cuda.empty_cache()


def _cut_pieces(out: torch.Tensor, fractions: Sequence[float]) -> list[torch.Tensor]:
    extent = storage_extent(out.shape, out.stride())
    flat = out.as_strided((extent,), (1,))
    starts = [int(fraction * max(0, extent - PIECE_ELEMENTS)) for fraction in fractions]
    return [flat[start : start + PIECE_ELEMENTS].clone() for start in starts]


HANDLERS: dict[str, Callable[[Session, Mapping[str, Any]], dict[str, Any]]] = {"vast": _run_large}
