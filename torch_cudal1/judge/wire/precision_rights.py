"""The precision switches of PyTorch that affect results, read in the parent and set in a child as
one value.

The contract fixes TF32: an op class has the right to it, or not. The other switches are those of
the user's process. `apply` sets them for good, in a disposable process; `enforce_rights` restores them.

A switch that already has the wanted meaning keeps its value. The values are part of Inductor's
cache keys, and "none" and "ieee" mean the same; with equal values the user's process finds what a
child compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torch_cudal1.ir.records import Contract

__all__ = ["apply", "choose_flags", "enforce_rights"]

# Attributes of torch.backends.cuda.matmul that permit sums in half precision.
_MATMUL = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


def choose_flags(contract: Contract) -> dict[str, str | bool]:
    """The switches under which the baseline and the candidate of a contract run (JSON)."""
    strict = contract.precision == "strict"
    flags: dict[str, str | bool] = {
        "matmul": _keep_matmul_spelling(
            "tf32" if "matmul" in contract.rights and not strict else "ieee"
        ),
        "conv": "tf32" if "conv" in contract.rights and not strict else "ieee",
        "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
        "deterministic": bool(torch.are_deterministic_algorithms_enabled()),
    }
    for name in _MATMUL:
        flags[name] = not strict and bool(getattr(torch.backends.cuda.matmul, name))
    return flags


def _keep_matmul_spelling(wanted: str) -> str:
    """The present value of the matmul switch if it means `wanted`, else `wanted`."""
    # "none" means unset, which computes as "ieee" does.
    said = str(torch.backends.cuda.matmul.fp32_precision)
    return said if (said == "tf32") == (wanted == "tf32") else wanted


def apply(flags: Mapping[str, str | bool]) -> None:
    """Set the switches in this process, for good."""
    precision = "high" if flags["matmul"] == "tf32" else "highest"
    # Only where it differs: setting it rewrites the newer switches, which are part of Inductor's
    # cache keys.
    if torch.get_float32_matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)
    # After the older switch, which rewrites this one.
    torch.backends.cuda.matmul.fp32_precision = str(flags["matmul"])
    parts: list[Any] = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn]  # type: ignore[attr-defined]
    for part in parts:
        # Both alike: otherwise reading the older `allow_tf32` raises.
        part.fp32_precision = str(flags["conv"])
    torch.backends.cudnn.benchmark = bool(flags["cudnn_benchmark"])
    deterministic = bool(flags["deterministic"])
    # "Off, but warn" is off too, and has another cache key in Inductor.
    torch.use_deterministic_algorithms(deterministic, warn_only=deterministic)
    for name in _MATMUL:
        setattr(torch.backends.cuda.matmul, name, bool(flags[name]))


@contextmanager
def enforce_rights(contract: Contract) -> Iterator[None]:
    """Run the body with the contract's TF32 rights on CUDA, then restore the user's switches."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = (matmul.fp32_precision, conv.fp32_precision)
    flags = choose_flags(contract)
    matmul.fp32_precision, conv.fp32_precision = flags["matmul"], flags["conv"]
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
