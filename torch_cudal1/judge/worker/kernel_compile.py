"""Has Triton compile the kernels that a call would launch, without launching them.

Compiling needs no GPU, and a GPU that times something is not disturbed. For programs of our own
templates only: what a call yields without its kernels is garbage, and must not be an address or an
index.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["compile_ahead", "has_kernels", "skip_launches"]


def has_kernels(source: str) -> bool:
    """Whether a source of our templates holds kernels that Triton compiles."""
    return "triton.jit" in source  # a comment with this text costs a useless call


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
    with torch.no_grad(), skip_launches():
        run(inputs)


@contextmanager
def skip_launches() -> Iterator[None]:
    """While the body runs, a launch of a Triton kernel compiles it and does no more.

    Where Triton was not imported, nothing changes.
    """
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    launch = jit.JITFunction.run

    def only_compile(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, warmup=True, **options)

    jit.JITFunction.run = only_compile
    try:
        yield
    finally:
        jit.JITFunction.run = launch
