"""Test helper: a cache with entries, whole or damaged, and commands over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_cudal1.__main__ import main
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Candidate, Contract, Entry, Region, Target
from torch_cudal1.store.cache.local_cache import LocalCache, Stored

TARGET = Target("cpu", "x86_64", "a CPU", "", "2.13.0", "")


def put_entry(root: Path, size: int, name: str, **more: Any) -> Entry:
    """Put a baseline entry of relu over `size` elements into the cache, with `more` evidence."""
    spec = TensorSpec("float32", (size,), (1,), "cpu")
    program = Program((spec,), (Aten("aten.relu.default", (Value(0),), (), (1,)),), (1,))
    region = Region(program, ("input",), name=name)
    attempts = (
        {
            "label": "fold -> eager",
            "decision": "rejected",
            "detector": "timing",
            "reason": "lower bound 1.01x, 1.05x is needed",
        },
    )
    evidence = {
        "checks": [{"name": "numerics", "passed": True, "value": 1.0, "limit": 2.0, "detail": ""}],
        **more,
    }
    choice = Candidate(program, "eager", "baseline")
    entry = Entry(
        region.key,
        name,
        TARGET,
        Contract(),
        choice,
        evidence,
        attempts,
        "2026-01-02T03:04:05+00:00",
        "0.1.0",
    )
    assert isinstance(LocalCache(root).put(entry), Stored)
    return entry


def damage(root: Path) -> Path:
    path = sorted(root.rglob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    return path


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    return code, capsys.readouterr().out
