"""Has Triton compile what a call would launch, and launches nothing: a compiler needs no GPU, and
one that times is left alone.

For programs of our own templates: what a call yields without its kernels is garbage, and must not
be an address or an index.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["compile_ahead", "has_kernels", "launching_nothing"]


def has_kernels(source: str) -> bool:
    """Whether a source of our templates holds what Triton compiles; a comment that says so costs a
    call.
    """
    return "triton.jit" in source


def compile_ahead(
    run: Callable[[list[torch.Tensor]], object],
    like: Sequence[tuple[Sequence[int], torch.dtype]],
    device: torch.device,
) -> None:
    """Call `run` on tensors of these shapes and dtypes, integers all 0. Raises what it raises."""
    inputs = [
        torch.empty(tuple(shape), dtype=dtype, device=device)
        if dtype.is_floating_point
        else torch.zeros(tuple(shape), dtype=dtype, device=device)
        for shape, dtype in like
    ]
    with torch.no_grad(), launching_nothing():
        run(inputs)


@contextmanager
def launching_nothing() -> Iterator[None]:
    """A first launch of a kernel of Triton compiles it and does no more. Where Triton was not
    imported, nothing changes.
    """
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    launch = jit.JITFunction.run

    def only_compile(kernel: Any, *args: Any, warmup: bool, **given: Any) -> Any:
        return launch(kernel, *args, warmup=True, **given)

    jit.JITFunction.run = only_compile
    try:
        yield
    finally:
        jit.JITFunction.run = launch
