"""The values between `propose` and `build`: a Proposal (what to try), and a KernelSource (one
launch) with its CUDA options.

A Proposal is small and JSON: it crosses the border into the build process, where the fusion group's
Program is lowered from it. Nothing here compiles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_cudal1.core.errors import ProgramError

__all__ = ["CudaOptions", "KernelSource", "Proposal"]


@dataclass(frozen=True)
class Proposal:
    """A way to lower a fusion group: `family` ("gemm", "softmax", "norm", "reduction", "elementwise")
    and `config`.

    `config`: "rows" and "columns" elements of a tile ("columns" absent: element-wise), "warps",
    "loop" (a row takes several column tiles), "split" (programs that share one row, in launches of
    their own; 1: one), "team" (programs of one launch share a row).
    """

    family: str
    # A mapping has no hash; two proposals are compared by all of it all the same.
    config: Mapping[str, int | str | bool] = field(hash=False)

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return {"family": self.family, "config": dict(self.config)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Proposal:
        """Read `to_json`'s value back. Raises ProgramError when it is not one."""
        family, config = data.get("family"), data.get("config")
        # The value comes from another process or a file: nothing of it is trusted before it is
        # checked.
        if not isinstance(family, str) or not isinstance(config, Mapping):
            raise ProgramError("proposal", f"{json.dumps(dict(data))} has no family and config")
        if not all(
            isinstance(k, str) and isinstance(v, (int, str, bool)) for k, v in config.items()
        ):
            raise ProgramError(
                "proposal",
                f"config {dict(config)!r} holds other things than numbers, words and flags",
            )
        # A copy: the caller's mapping may change later.
        return cls(family, dict(config))

    def number(self, name: str, default: int) -> int:
        """An integer of the config. Raises ProgramError when it is something else."""
        value = self.config.get(name, default)
        if not isinstance(value, int) or value < 0:
            raise ProgramError("proposal", f"config {name} is {value!r}; expected a number")
        return int(value)


@dataclass(frozen=True)
class KernelSource:
    """One launch before compilation: source text, pointer arguments (value number and Triton type),
    grid, warps.

    `stages` of Triton's software pipeline and the most `registers` of a thread (None: its
    defaults). `cuda`: the text is CUDA C++, for NVRTC; then `arguments` are all that the kernel
    takes, and its launch is known without asking the compiler.
    """

    symbol: str
    text: str
    arguments: tuple[tuple[int, str], ...]
    grid: int
    warps: int
    stages: int | None = None
    cuda: CudaOptions | None = None
    registers: int | None = None


@dataclass(frozen=True)
class CudaOptions:
    """How CUDA C++ is compiled and launched: definitions by name, dynamic shared memory in bytes,
    blocks of a cluster.
    """

    defines: tuple[tuple[str, int], ...] = ()
    shared_bytes: int = 0
    cluster: int = 1
