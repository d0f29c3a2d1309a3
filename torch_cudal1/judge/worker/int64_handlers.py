"""The child's side of inputs too large to travel: made where they are used, from a seed, and
answered in pieces.

Two processes with one kind of device make the same numbers from the same seed, so pieces of the
candidate's outputs can be held beside eager's. It compares nothing. The memory is given back before
the answer leaves.
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
from torch_cudal1.judge.worker.raw_copy import raw_tensors, refuse_lazy

if TYPE_CHECKING:
    from torch_cudal1.judge.worker.session import Session

__all__ = ["PIECE", "VERBS", "filled"]

PIECE = 4096  # elements of an output


def filled(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int, bound: int | None
) -> torch.Tensor:
    """Standard normal numbers, integers below `bound` (2 if None), or booleans."""
    generator = torch.Generator(device).manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)
    high = 2 if dtype == torch.bool or bound is None else min(bound, torch.iinfo(dtype).max)
    return torch.randint(max(1, high), shape, generator=generator, device=device, dtype=dtype)


def _vast(session: Session, request: Mapping[str, Any]) -> dict[str, Any]:
    """Call a slot on a set of which the tensors of `grown` ([position, shape, bound]) are made anew
    from `seed`.

    Answers the outputs' properties, and of each its elements in memory from the places that
    `pieces` names as parts of the whole, in the order of the outputs.
    """
    inputs = list(session.sets[request["inputs"]])
    outputs: list[torch.Tensor | None] = []
    try:
        for index, shape, bound in request["grown"]:
            inputs[index] = filled(
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
            piece for out in outputs if out is not None for piece in _pieces(out, request["pieces"])
        ]
        layout = raw_tensors(pieces, Path(request["path"]))
        return {"layout": layout, "facts": describe(outputs, inputs, [])}
    finally:
        outputs.clear()
        inputs.clear()
        gc.collect()
        if session.device.type == "cuda":
            torch.cuda.empty_cache()


def _pieces(out: torch.Tensor, places: Sequence[float]) -> list[torch.Tensor]:
    extent = storage_extent(out.shape, out.stride())
    flat = out.as_strided((extent,), (1,))
    starts = [int(place * max(0, extent - PIECE)) for place in places]
    return [flat[start : start + PIECE].clone() for start in starts]


VERBS: dict[str, Callable[[Session, Mapping[str, Any]], dict[str, Any]]] = {"vast": _vast}
