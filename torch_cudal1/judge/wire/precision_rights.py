"""The precision switches of PyTorch that decide what a result may look like, read here and set
elsewhere as one value.

The contract fixes TF32 (an op class has the right or has not); the other switches are the user's
own. Setting them is for a disposable process or inside `under`, which restores them.

What the user's switches say already stays as they say it: they are part of the names under which
Inductor keeps what it compiles, and "none" and "ieee" are two names of one thing. So what a child
compiles, the user's process finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torch_cudal1.ir.records import Contract

__all__ = ["apply", "flags_for", "under"]

_MATMUL = (  # attributes of torch.backends.cuda.matmul that permit sums in half precision
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


def flags_for(contract: Contract) -> dict[str, str | bool]:
    """The switches under which the baseline and the candidate of a contract run (JSON)."""
    strict = contract.precision == "strict"
    flags: dict[str, str | bool] = {
        "matmul": _in_own_words("tf32" if "matmul" in contract.rights and not strict else "ieee"),
        "conv": "tf32" if "conv" in contract.rights and not strict else "ieee",
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "deterministic": bool(torch.are_deterministic_algorithms_enabled()),
    }
    for name in _MATMUL:
        flags[name] = not strict and bool(getattr(torch.backends.cuda.matmul, name))
    return flags


def _in_own_words(wanted: str) -> str:
    """What the switch of products says now, if that is `wanted`: "none" is unset, and then IEEE."""
    said = str(torch.backends.cuda.matmul.fp32_precision)
    return said if (said == "tf32") == (wanted == "tf32") else wanted


def apply(flags: Mapping[str, str | bool]) -> None:
    """Set the switches in this process, for good."""
    precision = "high" if flags["matmul"] == "tf32" else "highest"
    if torch.get_float32_matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.matmul.fp32_precision = str(flags["matmul"])
    parts: list[Any] = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn]  # type: ignore[attr-defined]
    for part in parts:
        part.fp32_precision = str(flags["conv"])  # alike, or reading the older `allow_tf32` raises
    torch.backends.cudnn.benchmark = bool(flags["cudnn_benchmark"])
    deterministic = bool(flags["deterministic"])
    torch.use_deterministic_algorithms(
        deterministic, warn_only=deterministic
    )  # off, and to warn, is another name of off
    for name in _MATMUL:
        setattr(torch.backends.cuda.matmul, name, bool(flags[name]))


@contextmanager
def under(contract: Contract) -> Iterator[None]:
    """Run the body with the contract's TF32 rights on CUDA, then put the user's switches back."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = (matmul.fp32_precision, conv.fp32_precision)
    flags = flags_for(contract)
    matmul.fp32_precision, conv.fp32_precision = flags["matmul"], flags["conv"]
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
