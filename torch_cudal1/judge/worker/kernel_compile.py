"""Has Triton compile the kernels that a call would launch, without launching them.

Compiling does not use the GPU, so it disturbs no benchmark there. For sources of this package's
templates only: without its kernels a call computes garbage, which must not serve as an address or
an index.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["compile_ahead", "has_kernels", "skip_launches"]


def has_kernels(source: str) -> bool:
    """Whether a source of this package's templates has kernels that Triton compiles."""
    # A comment with this text would only cost a useless call.
    return "triton.jit" in source


def compile_ahead(
    run: Callable[[list[torch.Tensor]], object],
    like: Sequence[tuple[Sequence[int], torch.dtype]],
    device: torch.device,
) -> None:
    """Call `run` on tensors with these shapes and dtypes. Raises what `run` raises."""
    # Integers are 0: PyTorch's own operators run, and would read far away at a garbage index.
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
    """While the body runs, a launch of a Triton kernel only compiles it.

    Does nothing where Triton was not imported: no kernel was defined then.
    """
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    launch = jit.JITFunction.run

    def only_compile(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        # With warmup=True, Triton compiles the kernel and returns before the launch.
        return launch(kernel, *args, warmup=True, **options)

    jit.JITFunction.run = only_compile
    try:
        yield
    finally:
        jit.JITFunction.run = launch
