"""Sends Programs between the judge and its child: JSON in a frame, binaries in a safetensors file.
Both sides check the Programs that they read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Program
from torch_cudal1.judge.wire.channel import load_tensors, save_tensors

__all__ = ["read_payloads", "read_program", "require_tensor", "write_payloads"]


def write_payloads(program: Program, path: Path) -> list[Any]:
    """Write all binaries of a Program to one file. The result goes into a frame with `to_json`."""
    payloads = program.all_payloads()
    return [list(payloads), save_tensors(list(payloads.values()), path), str(path)]


def read_payloads(packed: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The inverse of `write_payloads`. Raises SandboxError where names and tensors do not match."""
    names, layout, path = packed
    tensors = load_tensors(layout, Path(path), torch.device("cpu"))
    # Its sender may have run foreign code, so a list that is too short is an answer to refuse.
    if len(names) != len(tensors):
        raise SandboxError(
            "reading tensors", f"{len(names)} names came with {len(tensors)} tensors"
        )
    return {str(name): require_tensor(tensor) for name, tensor in zip(names, tensors, strict=True)}


def read_program(data: Mapping[str, Any], packed: Sequence[Any]) -> Program:
    """A checked Program from its JSON and packed payloads. Raises ProgramError or SandboxError."""
    program = Program.from_json(data, read_payloads(packed))
    # A builder that ran foreign code may have sent it: nothing runs a Program unchecked.
    check_program(program)
    return program


def require_tensor(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise SandboxError("reading tensors", "a tensor is missing")
    return tensor
